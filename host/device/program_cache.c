/* Program binaries on disk, one file a key below kvl_cache_dir()/programs.
 *
 *   KVLPROG1 \n | sha256 of the binary, 64 hex digits | \n | binary
 *
 * The digest is checked before a driver sees a byte: drivers have been seen to crash on damaged binaries. */
#include "device_internal.h"
#include "file.h"
#include "log.h"
#include "mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char magic[] = "KVLPROG1\n";
enum { MAGIC_SIZE = sizeof magic - 1, HEX_SIZE = 64, HEADER_SIZE = MAGIC_SIZE + HEX_SIZE + 1 };

bool kvl_program_cache_serves(const struct kvl_caps *caps)
{
    const char *value = getenv("KVLAB_NO_PROGRAM_CACHE");
    if (value == NULL || *value == '\0' || strcmp(value, "0") == 0) return true;
    return strcmp(value, "1") != 0 && strstr(caps->platform, value) == NULL;
}

static kvl_status entry_path(const char *key, char *path, size_t size)
{
    kvl_status status = KVL_OK;
    char folder[3072];
    KVL_TRY(kvl_cache_dir(folder, sizeof folder - sizeof "/programs"));
    strcat(folder, "/programs");
    KVL_TRY(kvl_dir_make(folder));
    if (snprintf(path, size, "%s/%s.bin", folder, key) >= (int)size) status = kvl_fail(KVL_E_IO, "%s: path too long", folder);
done:
    return status;
}

static bool intact(const char *data, size_t size)
{
    char hex[65];
    return size > HEADER_SIZE && memcmp(data, magic, MAGIC_SIZE) == 0 && data[HEADER_SIZE - 1] == '\n' &&
           kvl_sha256(data + HEADER_SIZE, size - HEADER_SIZE, hex) == KVL_OK && memcmp(data + MAGIC_SIZE, hex, HEX_SIZE) == 0;
}

static bool load(const char *key, char **binary, size_t *size)
{
    char path[4096], *data = NULL;
    size_t n = 0;
    if (entry_path(key, path, sizeof path) != KVL_OK || access(path, R_OK) != 0) return false;
    if (kvl_file_read(path, &data, &n) != KVL_OK) return false;
    if (!intact(data, n)) {
        kvl_free(&data);
        return false;
    }
    memmove(data, data + HEADER_SIZE, n - HEADER_SIZE);
    *binary = data;
    *size = n - HEADER_SIZE;
    return true;
}

static kvl_status store(const char *key, const void *binary, size_t size)
{
    kvl_status status = KVL_OK;
    char path[4096], hex[65], *data = NULL;
    KVL_TRY(entry_path(key, path, sizeof path));
    KVL_TRY(kvl_sha256(binary, size, hex));
    KVL_TRY(kvl_alloc(&data, HEADER_SIZE + size, 1));
    memcpy(data, magic, MAGIC_SIZE);
    memcpy(data + MAGIC_SIZE, hex, HEX_SIZE);
    data[HEADER_SIZE - 1] = '\n';
    memcpy(data + HEADER_SIZE, binary, size);
    KVL_TRY(kvl_file_write(path, data, HEADER_SIZE + size));
done:
    kvl_free(&data);
    return status;
}

bool kvl_program_cache_load(const char *key, char **binary, size_t *size)
{
    const bool had_error = kvl_error_text()[0] != '\0';
    const bool found = load(key, binary, size);
    if (!found && !had_error) kvl_error_clear();
    return found;
}

void kvl_program_cache_store(const char *key, const void *binary, size_t size)
{
    static bool warned;
    const bool had_error = kvl_error_text()[0] != '\0';
    if (store(key, binary, size) == KVL_OK || had_error) return;
    if (!warned) kvl_warn("program cache not written: %s", kvl_error_text());
    warned = true;
    kvl_error_clear();
}
