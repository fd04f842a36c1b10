/* Files: whole reads, atomic writes, paths, digests. */
#ifndef KVL_FILE_H
#define KVL_FILE_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>

/* Whole file into *data (size *size, one extra NUL byte after it). Free with kvl_free. */
kvl_status kvl_file_read(const char *path, char **data, size_t *size);

/* Writes through a temporary file in the same folder and renames: readers see the old or the new content, never half. */
kvl_status kvl_file_write(const char *path, const void *data, size_t size);

/* mkdir -p. */
kvl_status kvl_dir_make(const char *path);

/* $KVLAB_CACHE_DIR, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab; made if missing. */
kvl_status kvl_cache_dir(char *path, size_t size);

/* SHA-256 as 64 hex digits + NUL. */
kvl_status kvl_sha256(const void *data, size_t size, char hex[65]);
kvl_status kvl_sha256_file(const char *path, char hex[65]);

#endif
