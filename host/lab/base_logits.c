#include "base_logits.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include "text.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DIGEST_BYTES = 64 };

struct kvl_base_logits {
    struct kvl_text depends_on, path;
    const char *folder;            /* borrowed */
    size_t row_bytes, n_row_bytes; /* of one row, of all */
    char *file;                    /* [DIGEST_BYTES + n_row_bytes] */
    bool known;
};

/* Found out before anything is computed. */
static kvl_status make_folder(const char *folder)
{
    struct stat info;
    if (*folder == '\0') return kvl_fail(KVL_E_USAGE, "--base-logits: wanted a folder, found an empty text");
    const kvl_status status = kvl_dir_make(folder);
    if (status != KVL_OK) return status;
    if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode)) return kvl_fail(KVL_E_USAGE, "--base-logits %s: it is there and no folder", folder);
    return access(folder, R_OK | W_OK | X_OK) == 0 ? KVL_OK : kvl_fail(KVL_E_IO, "--base-logits %s: no files can be made there: %s", folder, strerror(errno));
}

kvl_status kvl_base_logits_open(const char *folder, const char *depends_on, uint32_t n_rows, uint32_t n_vocab, struct kvl_base_logits **out)
{
    kvl_status status = KVL_OK;
    struct kvl_base_logits *kept = NULL;
    char program[65];
    KVL_TRY(kvl_alloc(&kept, 1, sizeof *kept));
    kept->folder = folder;
    kept->row_bytes = (size_t)n_vocab * sizeof(float);
    kept->n_row_bytes = n_rows * kept->row_bytes;
    KVL_TRY(make_folder(folder));
    KVL_TRY(kvl_alloc(&kept->file, DIGEST_BYTES + kept->n_row_bytes, 1));
    KVL_TRY(kvl_sha256_file("/proc/self/exe", program));
    KVL_TRY(kvl_text_printf(&kept->depends_on, "program=%s\nrows=%u\nvocab=%u\n%s", program, n_rows, n_vocab, depends_on));
    *out = kept;
    kept = NULL;
done:
    kvl_base_logits_close(&kept);
    return status;
}

void kvl_base_logits_close(struct kvl_base_logits **kept)
{
    if (*kept == NULL) return;
    kvl_text_free(&(*kept)->depends_on);
    kvl_text_free(&(*kept)->path);
    kvl_free(&(*kept)->file);
    kvl_free(kept);
}

static kvl_status name_file(struct kvl_base_logits *kept, const int32_t *tokens, uint32_t n)
{
    kvl_status status = KVL_OK;
    struct kvl_text key = {0};
    char hex[65];
    KVL_TRY(kvl_text_append(&key, kept->depends_on.data, kept->depends_on.size));
    KVL_TRY(kvl_text_append(&key, (const char *)tokens, n * sizeof *tokens));
    KVL_TRY(kvl_sha256(key.data, key.size, hex));
    kept->path.size = 0;
    KVL_TRY(kvl_text_printf(&kept->path, "%s/%.32s.logits", kept->folder, hex));
done:
    kvl_text_free(&key);
    return status;
}

/* Whether the file is there and whole. */
static bool read_whole(struct kvl_base_logits *kept)
{
    char digest[65];
    FILE *file = fopen(kept->path.data, "rb");
    if (file == NULL) return false;
    const size_t size = DIGEST_BYTES + kept->n_row_bytes;
    const bool whole = fread(kept->file, 1, size, file) == size && fgetc(file) == EOF &&
                       kvl_sha256(kept->file + DIGEST_BYTES, kept->n_row_bytes, digest) == KVL_OK && memcmp(digest, kept->file, DIGEST_BYTES) == 0;
    fclose(file);
    if (!whole) kvl_warn("%s is damaged; its logits are computed again", kept->path.data);
    return whole;
}

kvl_status kvl_base_logits_begin(struct kvl_base_logits *kept, const int32_t *tokens, uint32_t n)
{
    const kvl_status status = name_file(kept, tokens, n);
    kept->known = status == KVL_OK && read_whole(kept);
    return status;
}

bool kvl_base_logits_known(const struct kvl_base_logits *kept) { return kept->known; }

float *kvl_base_logits_rows(struct kvl_base_logits *kept, uint32_t at) { return (float *)(kept->file + DIGEST_BYTES + at * kept->row_bytes); }

kvl_status kvl_base_logits_end(struct kvl_base_logits *kept)
{
    char digest[65];
    if (kept->known) return KVL_OK;
    const kvl_status status = kvl_sha256(kept->file + DIGEST_BYTES, kept->n_row_bytes, digest);
    if (status != KVL_OK) return status;
    memcpy(kept->file, digest, DIGEST_BYTES);
    return kvl_file_write(kept->path.data, kept->file, DIGEST_BYTES + kept->n_row_bytes);
}
