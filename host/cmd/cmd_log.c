/* kvlab log show, log repair: run files after the run. */
#include "cmd.h"
#include "runfile.h"
#include <stdio.h>

struct show_args {
    bool json;
};

static const struct kvl_opt show_options[] = {KVL_OPTION_JSON(struct show_args)};

static kvl_status run_show(void *data, size_t n_words, char *const *words)
{
    const struct show_args *args = data;
    kvl_status status = KVL_OK;
    if (n_words == 0) return kvl_fail(KVL_E_USAGE, "log show: give one or more run files");
    if (args->json && n_words > 1)
        return kvl_fail(KVL_E_USAGE, "log show --json prints one object: give one run file, not %zu", n_words);
    for (size_t i = 0; i < n_words; i++) {
        if (i > 0) printf("\n");
        KVL_TRY(kvl_runfile_show(words[i], args->json));
    }
done:
    return status;
}

const struct kvl_command kvl_cmd_log_show = {
    .name = "log show",
    .summary = "print what a run file says",
    .words = "FILE...",
    .details = "Prints where the run came from, its configuration, memory and quality, and the first rows of each table.\n"
               "A run that is still going on can be shown too (its FILE.h5.part): rows up to the last commit.\n\n"
               "    kvlab log show runs/kivi2.h5\n"
               "    kvlab log show --json runs/kivi2.h5 | jq '.\"/quality\".ppl'",
    .options = show_options,
    .n_options = sizeof show_options / sizeof *show_options,
    .args_size = sizeof(struct show_args),
    .run = run_show,
};

static kvl_status run_repair(void *args, size_t n_words, char *const *words)
{
    kvl_status status = KVL_OK;
    char new_path[4096];
    if (n_words != 1) return kvl_fail(KVL_E_USAGE, "log repair: give one FILE.h5.part");
    KVL_TRY(kvl_runfile_repair(words[0], new_path, sizeof new_path));
    printf("%s\n", new_path);
done:
    return status;
}

const struct kvl_command kvl_cmd_log_repair = {
    .name = "log repair",
    .summary = "finish the file of a run that died",
    .words = "FILE.h5.part",
    .details = "Cuts off rows that were not committed, sets status to \"partial\", renames FILE.h5.part to FILE.partial.h5 and "
               "prints that name.\n\n"
               "    kvlab log repair runs/kivi2.h5.part",
    .run = run_repair,
};
