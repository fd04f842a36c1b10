/* A file driver of HDF5 that keeps all writes in memory until they are applied in an order that a kill cannot hurt. Internal to
 * this room. */
#ifndef KVL_RUNFILE_DRIVER_H
#define KVL_RUNFILE_DRIVER_H
#include "runfile_hdf5.h"

/* File access properties with the driver and H5F_CLOSE_SEMI: closing fails while an id is open. Such a file is a plain HDF5 file;
 * others read it with any driver. */
kvl_status kvl_driver_access(const char *path, hid_t *access_list);

/* Makes a new file fit the driver: space is not reused, and an index node fills a page. */
kvl_status kvl_driver_creation(const char *path, hid_t creation_list);

/* Opens an existing file for changes. */
kvl_status kvl_driver_open(const char *path, hid_t *file);

/* H5Fflush, then everything that HDF5 wrote since the last time goes to the file:
 *   1 the file grows, and what lies behind its old end is written;
 *   2 barrier (fdatasync);
 *   3 what overwrites old bytes is written, from the front to the back.
 * If 1 fails (disk full) the old content is untouched, and nothing will be written any more. What is not applied is lost at close.
 */
kvl_status kvl_driver_apply(const char *path, hid_t file);

/* kvl_driver_apply, and all of it on the disk. */
kvl_status kvl_driver_sync(const char *path, hid_t file);

#endif
