/* What the files of the run file share: HDF5 calls with one error text, attributes, row counts, durable renames. Internal to this
 * room. */
#ifndef KVL_RUNFILE_HDF5_H
#define KVL_RUNFILE_HDF5_H
#include "status.h"
#define H5_USE_110_API /* the names of HDF5 1.10, also in later versions */
#include <hdf5.h>
#include <stddef.h>
#include <stdint.h>

#define KVL_PHONY_AXIS "This is a netCDF dimension but not a netCDF variable." /* NAME of an axis without values, plus %10d */
#define KVL_COMMITTED "committed" /* scalar of a table: rows that are valid in all columns */
#define KVL_PART ".part"
enum { KVL_SCHEMA_VERSION = 1, KVL_PATH_MAX = 4096, KVL_STATUS_BYTES = 16, KVL_MAX_RANK = 8 };

/* Runs an HDF5 call; on failure makes "<path>: cannot <what>: <reason>" the error text and goes to `done`. */
#define KVL_H5(path, call, ...)                                                                                                    \
    do {                                                                                                                           \
        if ((call) < 0) {                                                                                                          \
            status = kvl_h5_fail(path, __VA_ARGS__);                                                                               \
            goto done;                                                                                                             \
        }                                                                                                                          \
    } while (0)

/* Turns the library's error stack into a kvl_fail: KVL_E_IO if the operating system refused (disk full ...), else KVL_E_HDF5. */
kvl_status kvl_h5_fail(const char *path, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* What an errno means for a run file. */
const char *kvl_reason_text(int error);

/* Stops the library from printing its error stack. */
void kvl_h5_quiet(void);

/* Closes an id of any kind and makes it invalid; an invalid one is fine. */
void kvl_h5_close(hid_t *id);

/* Sets a scalar attribute, in place if the old one has room: then nothing is created, which keeps a dying file readable.
 * Bytes that are not UTF-8 become '?'. `room`: bytes to reserve for later values, 0 = as many as needed now. */
kvl_status kvl_h5_set_text(const char *path, hid_t object, const char *name, const char *value, size_t room);
kvl_status kvl_h5_set_number(const char *path, hid_t object, const char *name, hid_t type, const void *value);

/* Text attribute into `value`; KVL_E_FORMAT if it is missing, no text, or longer than size - 1. */
kvl_status kvl_h5_get_text(const char *path, hid_t object, const char *name, char *value, size_t size);

/* Sets the length of a dataset's first axis. */
kvl_status kvl_h5_set_rows(const char *path, hid_t dataset, const char *name, uint64_t rows);

/* Copies n bytes of text, with '?' for each byte that is not part of valid UTF-8. */
void kvl_utf8_copy(char *out, const char *text, size_t n);

/* fsync of the folder that holds `path`: makes a new name durable. */
kvl_status kvl_folder_sync(const char *path);

/* fsync, rename, fsync of the folder. KVL_E_IO if `to` exists. */
kvl_status kvl_file_publish(const char *from, const char *to);

#endif
