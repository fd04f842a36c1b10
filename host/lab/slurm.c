#include "slurm.h"
#include "file.h"
#include "log.h"
#include "text.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* A line a waiting cell: its id. */
static kvl_status list_cells(const struct kvl_sweep *sweep, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    for (size_t i = 0; i < sweep->n; i++)
        if (sweep->cell[i].state == KVL_CELL_WAITS) KVL_TRY(kvl_text_printf(out, "%s\n", sweep->cell[i].id));
done:
    return status;
}

/* In single quotes, as a shell reads it. */
static kvl_status quote(struct kvl_text *out, const char *text)
{
    kvl_status status = KVL_OK;
    KVL_TRY(kvl_text_append(out, "'", 1));
    for (const char *c = text; *c; c++) KVL_TRY(*c == '\'' ? kvl_text_append(out, "'\\''", 4) : kvl_text_append(out, c, 1));
    KVL_TRY(kvl_text_append(out, "'", 1));
done:
    return status;
}

/* Task i runs the ids in lines (i - 1) per_task + 1 to i per_task of the list. */
static kvl_status write_script(const struct kvl_slurm *slurm, const struct kvl_sweep *sweep, const char *base, uint64_t tasks, uint64_t per_task,
                               struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    const char *device = getenv("KVLAB_DEVICE");
    KVL_TRY(kvl_text_printf(out,
                            "#!/bin/bash\n#SBATCH --job-name=%s\n#SBATCH --array=1-%llu\n#SBATCH --requeue\n#SBATCH --open-mode=append\n"
                            "#SBATCH --output=%s-%%a.out\n",
                            slurm->name, (unsigned long long)tasks, base));
    for (size_t i = 0; i < slurm->n_options; i++) KVL_TRY(kvl_text_printf(out, "#SBATCH %s\n", slurm->options[i]));
    KVL_TRY(kvl_text_printf(out, "last=$((SLURM_ARRAY_TASK_ID * %llu))\nonly=$(sed -n \"$((last - %llu + 1)),${last}p\" ",
                            (unsigned long long)per_task, (unsigned long long)per_task));
    KVL_TRY(quote(out, base));
    KVL_TRY(kvl_text_printf(out, ".cells | tr '\\n' ,)\n"));
    if (device) KVL_TRY(kvl_text_printf(out, "export KVLAB_DEVICE="));
    if (device) KVL_TRY(quote(out, device));
    KVL_TRY(kvl_text_printf(out, "%sexec ", device ? "\n" : ""));
    KVL_TRY(quote(out, slurm->program));
    KVL_TRY(kvl_text_printf(out, " sweep "));
    KVL_TRY(quote(out, slurm->grid));
    KVL_TRY(kvl_text_printf(out, " --output "));
    KVL_TRY(quote(out, sweep->out));
    KVL_TRY(kvl_text_printf(out, " --only \"$only\"\n"));
done:
    return status;
}

static kvl_status run_sbatch(const char *script)
{
    const pid_t pid = fork();
    int result = 0;
    if (pid == 0) {
        execlp("sbatch", "sbatch", "--parsable", script, (char *)NULL);
        _exit(errno == ENOENT ? KVL_EXIT_SKIP : KVL_EXIT_ERROR);
    }
    if (pid < 0 || waitpid(pid, &result, 0) != pid) return kvl_fail(KVL_E_IO, "cannot start sbatch: %s", strerror(errno));
    if (WIFEXITED(result) && WEXITSTATUS(result) == 0) return KVL_OK;
    if (WIFEXITED(result) && WEXITSTATUS(result) == KVL_EXIT_SKIP)
        return kvl_fail(KVL_E_UNSUPPORTED, "there is no sbatch on the PATH; submit %s on a machine that has Slurm", script);
    return kvl_fail(KVL_E_IO, "sbatch refused %s (its message is above)", script);
}

kvl_status kvl_slurm_submit(const struct kvl_slurm *slurm, const struct kvl_sweep *sweep)
{
    kvl_status status = KVL_OK;
    struct kvl_text cells = {0}, script = {0};
    char base[PATH_MAX], path[PATH_MAX + 8], stamp[32];
    const uint64_t n = kvl_sweep_count(sweep, KVL_CELL_WAITS);
    const uint64_t per_task = slurm->per_task ? slurm->per_task : (n + KVL_SLURM_TASKS - 1) / KVL_SLURM_TASKS;
    if (n == 0) {
        kvl_info("%s: all %zu cells are done; nothing to submit", sweep->out, sweep->n);
        return KVL_OK;
    }
    const time_t now = time(NULL);
    struct tm utc;
    strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", gmtime_r(&now, &utc));
    snprintf(base, sizeof base, "%s/slurm-%s", sweep->out, stamp);
    KVL_TRY(kvl_dir_make(sweep->out));
    KVL_TRY(list_cells(sweep, &cells));
    KVL_TRY(write_script(slurm, sweep, base, (n + per_task - 1) / per_task, per_task, &script));
    snprintf(path, sizeof path, "%s.cells", base);
    KVL_TRY(kvl_file_write(path, cells.data, cells.size));
    snprintf(path, sizeof path, "%s.sh", base);
    KVL_TRY(kvl_file_write(path, script.data, script.size));
    kvl_info("%s: %llu of %zu cells wait", sweep->out, (unsigned long long)n, sweep->n);
    KVL_TRY(run_sbatch(path));
done:
    kvl_text_free(&cells);
    kvl_text_free(&script);
    return status;
}
