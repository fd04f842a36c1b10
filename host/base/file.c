#include "file.h"
#include "mem.h"
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

kvl_status kvl_file_read(const char *path, char **data, size_t *size)
{
    kvl_status status = KVL_OK;
    char *content = NULL;
    size_t used = 0, room = 1 << 16;
    FILE *file = fopen(path, "rb");
    if (file == NULL) return kvl_fail(KVL_E_IO, "%s: cannot open for reading: %s", path, strerror(errno));
    struct stat info;
    if (fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode)) room = (size_t)info.st_size + 2;
    KVL_TRY(kvl_alloc(&content, room, 1));
    for (size_t got; (got = fread(content + used, 1, room - used - 1, file)) > 0;) {
        used += got;
        if (used + 1 == room) KVL_TRY(kvl_realloc(&content, room *= 2, 1));
    }
    if (ferror(file)) {
        status = kvl_fail(KVL_E_IO, "%s: read failed: %s", path, strerror(errno));
        goto done;
    }
    content[used] = '\0';
    *data = content;
    *size = used;
    content = NULL;
done:
    fclose(file);
    kvl_free(&content);
    return status;
}

static kvl_status write_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        const ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return KVL_E_IO;
        data += n;
        size -= (size_t)n;
    }
    return KVL_OK;
}

kvl_status kvl_file_write(const char *path, const void *data, size_t size)
{
    char temporary[4096];
    if (snprintf(temporary, sizeof temporary, "%s.XXXXXX", path) >= (int)sizeof temporary)
        return kvl_fail(KVL_E_IO, "%s: path too long", path);
    const int fd = mkstemp(temporary);
    if (fd < 0) return kvl_fail(KVL_E_IO, "%s: cannot create it: %s", path, strerror(errno));
    kvl_status status = write_all(fd, data, size);
    if (fchmod(fd, 0644) != 0 || fsync(fd) != 0) status = KVL_E_IO;
    if (close(fd) != 0) status = KVL_E_IO;
    if (status == KVL_OK && rename(temporary, path) != 0) status = KVL_E_IO;
    if (status != KVL_OK) {
        kvl_fail(KVL_E_IO, "%s: write of %zu bytes failed: %s", path, size, strerror(errno));
        unlink(temporary);
    }
    return status;
}

kvl_status kvl_dir_make(const char *path)
{
    char part[4096];
    const size_t n = strlen(path);
    if (n == 0) return KVL_OK;
    if (n >= sizeof part) return kvl_fail(KVL_E_IO, "%s: path too long", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != '\0') continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return kvl_fail(KVL_E_IO, "%s: cannot make folder: %s", part, strerror(errno));
    }
    return KVL_OK;
}

kvl_status kvl_cache_dir(char *path, size_t size)
{
    const char *own = getenv("KVLAB_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n;
    if (own && *own) n = snprintf(path, size, "%s", own);
    else if (xdg && *xdg) n = snprintf(path, size, "%s/kvlab", xdg);
    else n = snprintf(path, size, "%s/.cache/kvlab", home && *home ? home : "/tmp");
    if (n < 0 || (size_t)n >= size) return kvl_fail(KVL_E_IO, "cache folder: path too long");
    return kvl_dir_make(path);
}

static void to_hex(const unsigned char *digest, char hex[65])
{
    for (int i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

kvl_status kvl_sha256(const void *data, size_t size, char hex[65])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    if (EVP_Digest(data, size, digest, NULL, EVP_sha256(), NULL) != 1) return kvl_fail(KVL_E_MEMORY, "sha256 failed");
    to_hex(digest, hex);
    return KVL_OK;
}

kvl_status kvl_sha256_file(const char *path, char hex[65])
{
    kvl_status status = KVL_OK;
    unsigned char digest[EVP_MAX_MD_SIZE], block[1 << 16];
    EVP_MD_CTX *context = NULL;
    FILE *file = fopen(path, "rb");
    if (file == NULL) return kvl_fail(KVL_E_IO, "%s: cannot open for reading: %s", path, strerror(errno));
    context = EVP_MD_CTX_new();
    if (context == NULL || EVP_DigestInit_ex(context, EVP_sha256(), NULL) != 1) {
        status = kvl_fail(KVL_E_MEMORY, "sha256 failed");
        goto done;
    }
    for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;) EVP_DigestUpdate(context, block, n);
    if (ferror(file)) {
        status = kvl_fail(KVL_E_IO, "%s: read failed: %s", path, strerror(errno));
        goto done;
    }
    EVP_DigestFinal_ex(context, digest, NULL);
    to_hex(digest, hex);
done:
    EVP_MD_CTX_free(context);
    fclose(file);
    return status;
}
