/* The run file's HDF5 driver: see runfile_driver.h.
 *
 * HDF5's own flush writes in the order of addresses. A process killed in the middle can leave an index node that names blocks
 * which are not written yet, or which the superblock does not know of, or a node of which one half is old, because the kernel
 * stops a killed write between two pages: then committed rows are unreadable (each was seen within a few hundred kills on a file
 * system in memory). And a flush that meets a full disk leaves a superblock that promises more than the file has: nothing opens
 * that.
 *
 * Here new blocks are written first and old bytes last, front to back, so that every state on the way opens:
 *   - space is only ever taken from the end of the file, never reused: what is new lies behind the old end;
 *   - an object smaller than a page lies within one page, which is written whole or not at all;
 *   - the superblock is in page 0, and nodes of an index lie behind their parent because they were made later.
 *
 * HDF5 never sees an error of writing; kvl_driver_apply reports it. */
#include "runfile_driver.h"
#include "mem.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGE_BYTES = 4096, RUN_PAGES = 64 };

/* Bytes of the file that were written since the last apply, with their surroundings. */
struct page {
    uint64_t number;
    char *bytes; /* [PAGE_BYTES] */
};

struct driver {
    H5FD_t head; /* first: HDF5 knows only this part */
    int fd;
    haddr_t eoa, eof;    /* end of allocated, of written addresses */
    uint64_t disk_bytes; /* length of the file on disk */
    struct page *pages;  /* by number */
    size_t n_pages, room;
    kvl_status broken;
    int error; /* errno that broke it, 0 = memory */
};

/* --- pages ------------------------------------------------------------------------------------------------------------------ */

/* Index of the first page with this number or a higher one. */
static size_t page_index(const struct driver *d, uint64_t number)
{
    size_t low = 0, high = d->n_pages;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (d->pages[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Bytes from the disk; zeros behind its end. False with errno set if that fails. */
static bool read_disk(const struct driver *d, uint64_t at, char *bytes, size_t n)
{
    while (n > 0) {
        const ssize_t got = pread(d->fd, bytes, n, (off_t)at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return false;
        if (got == 0) {
            memset(bytes, 0, n);
            return true;
        }
        bytes += got;
        at += (uint64_t)got;
        n -= (size_t)got;
    }
    return true;
}

static kvl_status new_page(struct driver *d, size_t index, uint64_t number)
{
    kvl_status status = KVL_OK;
    struct page page = {number, NULL};
    if (d->n_pages == d->room) {
        KVL_TRY(kvl_realloc(&d->pages, d->room == 0 ? 256 : 2 * d->room, sizeof *d->pages));
        d->room = d->room == 0 ? 256 : 2 * d->room;
    }
    KVL_TRY(kvl_alloc(&page.bytes, PAGE_BYTES, 1));
    if (number < d->disk_bytes / PAGE_BYTES + 1 && !read_disk(d, number * PAGE_BYTES, page.bytes, PAGE_BYTES)) {
        d->error = errno;
        kvl_free(&page.bytes);
        return KVL_E_IO;
    }
    memmove(d->pages + index + 1, d->pages + index, (d->n_pages - index) * sizeof *d->pages);
    d->pages[index] = page;
    d->n_pages++;
done:
    return status;
}

static void drop_pages(struct driver *d)
{
    for (size_t i = 0; i < d->n_pages; i++) kvl_free(&d->pages[i].bytes);
    d->n_pages = 0;
}

/* The part of a page that the range [at, at + n) covers. */
static size_t part_of_page(uint64_t at, size_t n)
{
    const size_t left = PAGE_BYTES - (size_t)(at % PAGE_BYTES);
    return n < left ? n : left;
}

/* --- callbacks -------------------------------------------------------------------------------------------------------------- */

/* The text that HDF5's own drivers use, for kvl_h5_fail to find. */
static void push_errno(const char *what, int error)
{
    H5Epush2(H5E_DEFAULT, __FILE__, __func__, __LINE__, H5E_ERR_CLS, H5E_FILE, H5E_CANTOPENFILE, "%s: errno = %d", what, error);
}

static H5FD_t *driver_open(const char *name, unsigned flags, hid_t access_list, haddr_t max_address)
{
    struct driver *d = NULL;
    struct stat info;
    const int mode = (flags & H5F_ACC_RDWR ? O_RDWR : O_RDONLY) | (flags & H5F_ACC_TRUNC ? O_TRUNC : 0) |
                     (flags & H5F_ACC_CREAT ? O_CREAT : 0) | (flags & H5F_ACC_EXCL ? O_EXCL : 0) | O_CLOEXEC;
    if (kvl_alloc(&d, 1, sizeof *d) != KVL_OK) {
        push_errno("unable to open file", ENOMEM);
        return NULL;
    }
    d->fd = open(name, mode, 0666);
    if (d->fd < 0 || fstat(d->fd, &info) != 0) {
        push_errno("unable to open file", errno);
        if (d->fd >= 0) close(d->fd);
        kvl_free(&d);
        return NULL;
    }
    d->disk_bytes = d->eof = (haddr_t)info.st_size;
    return &d->head;
}

static herr_t driver_close(H5FD_t *file)
{
    struct driver *d = (struct driver *)file;
    drop_pages(d);
    close(d->fd);
    kvl_free(&d->pages);
    kvl_free(&d);
    return 0;
}

static herr_t driver_query(const H5FD_t *file, unsigned long *flags)
{
    *flags = H5FD_FEAT_DATA_SIEVE | H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
    return 0;
}

static haddr_t driver_get_eoa(const H5FD_t *file, H5FD_mem_t type) { return ((const struct driver *)file)->eoa; }

static herr_t driver_set_eoa(H5FD_t *file, H5FD_mem_t type, haddr_t address)
{
    ((struct driver *)file)->eoa = address;
    return 0;
}

/* New space: at the end, small objects not across pages. */
static haddr_t driver_alloc(H5FD_t *file, H5FD_mem_t type, hid_t transfer, hsize_t size)
{
    struct driver *d = (struct driver *)file;
    const haddr_t in_page = d->eoa % PAGE_BYTES;
    const haddr_t at = size <= PAGE_BYTES && in_page + size > PAGE_BYTES ? d->eoa + PAGE_BYTES - in_page : d->eoa;
    d->eoa = at + size;
    return at;
}

static haddr_t driver_get_eof(const H5FD_t *file, H5FD_mem_t type) { return ((const struct driver *)file)->eof; }

static herr_t driver_get_handle(H5FD_t *file, hid_t access_list, void **handle)
{
    *handle = file;
    return 0;
}

static herr_t driver_read(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size, void *buffer)
{
    const struct driver *d = (const struct driver *)file;
    char *to = buffer;
    for (size_t n; size > 0; to += n, address += n, size -= n) {
        const size_t index = page_index(d, address / PAGE_BYTES);
        n = part_of_page(address, size);
        if (index < d->n_pages && d->pages[index].number == address / PAGE_BYTES) {
            memcpy(to, d->pages[index].bytes + address % PAGE_BYTES, n);
        } else if (!read_disk(d, address, to, n)) {
            push_errno("unable to read file", errno);
            return -1;
        }
    }
    return 0;
}

static herr_t driver_write(H5FD_t *file, H5FD_mem_t type, hid_t transfer, haddr_t address, size_t size, const void *buffer)
{
    struct driver *d = (struct driver *)file;
    const char *from = buffer;
    if (address + size > d->eof) d->eof = address + size;
    for (size_t n; size > 0; from += n, address += n, size -= n) {
        const uint64_t number = address / PAGE_BYTES;
        const size_t index = page_index(d, number);
        kvl_status status = KVL_OK;
        n = part_of_page(address, size);
        if (index == d->n_pages || d->pages[index].number != number) status = new_page(d, index, number);
        if (status != KVL_OK) {
            d->broken = status;
            return 0;
        }
        memcpy(d->pages[index].bytes + address % PAGE_BYTES, from, n);
    }
    return 0;
}

static herr_t driver_lock(H5FD_t *file, hbool_t writes)
{
    if (flock(((struct driver *)file)->fd, (writes ? LOCK_EX : LOCK_SH) | LOCK_NB) == 0 || errno == ENOSYS) return 0;
    push_errno("unable to lock file", errno);
    return -1;
}

static herr_t driver_unlock(H5FD_t *file) { return flock(((struct driver *)file)->fd, LOCK_UN) == 0 || errno == ENOSYS ? 0 : -1; }

static const H5FD_class_t driver_class = {
    .name = "kvl_ordered",
    .maxaddr = INT64_MAX,
    .fc_degree = H5F_CLOSE_SEMI,
    .open = driver_open,
    .close = driver_close,
    .query = driver_query,
    .alloc = driver_alloc,
    .get_eoa = driver_get_eoa,
    .set_eoa = driver_set_eoa,
    .get_eof = driver_get_eof,
    .get_handle = driver_get_handle,
    .read = driver_read,
    .write = driver_write,
    .lock = driver_lock,
    .unlock = driver_unlock,
    .fl_map = H5FD_FLMAP_DICHOTOMY,
};

/* --- apply ------------------------------------------------------------------------------------------------------------------ */

/* Pages from `first` on that follow one another, as one write within [from, to). False with errno set if that fails. */
static bool write_run(const struct driver *d, size_t first, size_t n, uint64_t from, uint64_t to)
{
    struct iovec parts[RUN_PAGES];
    uint64_t start = d->pages[first].number * PAGE_BYTES;
    size_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        const uint64_t at = d->pages[first + i].number * PAGE_BYTES, end = at + PAGE_BYTES;
        const uint64_t skip = at < from ? from - at : 0, cut = end > to ? end - to : 0;
        parts[i] = (struct iovec){d->pages[first + i].bytes + skip, PAGE_BYTES - skip - cut};
        bytes += parts[i].iov_len;
    }
    if (start < from) start = from;
    errno = EIO; /* for a short write, which has no errno */
    return pwritev(d->fd, parts, (int)n, (off_t)start) == (ssize_t)bytes;
}

static bool write_range(const struct driver *d, uint64_t from, uint64_t to)
{
    size_t i = page_index(d, from / PAGE_BYTES);
    for (size_t n; i < d->n_pages && d->pages[i].number * PAGE_BYTES < to; i += n) {
        for (n = 1; n < RUN_PAGES && i + n < d->n_pages; n++) {
            const uint64_t number = d->pages[i + n].number;
            if (number != d->pages[i].number + n || number * PAGE_BYTES >= to) break;
        }
        if (!write_run(d, i, n, from, to)) return false;
    }
    return true;
}

/* Makes the file longer with real blocks, so that later writes find their space. */
static bool grow(const struct driver *d)
{
    if (d->eoa <= d->disk_bytes) return true;
    const int error = posix_fallocate(d->fd, (off_t)d->disk_bytes, (off_t)(d->eoa - d->disk_bytes));
    if (error == EOPNOTSUPP || error == EINVAL) return ftruncate(d->fd, (off_t)d->eoa) == 0;
    errno = error;
    return error == 0;
}

static bool apply(struct driver *d)
{
    const uint64_t old = d->disk_bytes;
    if (!grow(d) || !write_range(d, old, d->eoa)) {
        const int error = errno;
        if (ftruncate(d->fd, (off_t)old) == 0) errno = error;
        return false;
    }
    if (fdatasync(d->fd) != 0 || !write_range(d, 0, old < d->eoa ? old : d->eoa)) return false;
    if (d->eoa < old && ftruncate(d->fd, (off_t)d->eoa) != 0) return false;
    d->disk_bytes = d->eoa;
    drop_pages(d);
    return true;
}

static kvl_status broken_text(const struct driver *d, const char *path)
{
    if (d->broken == KVL_E_MEMORY) return kvl_fail(KVL_E_MEMORY, "%s: cannot write to disk: out of host memory", path);
    return kvl_fail(d->broken, "%s: cannot write to disk: %s", path, kvl_reason_text(d->error));
}

static kvl_status driver_of(const char *path, hid_t file, struct driver **d)
{
    kvl_status status = KVL_OK;
    void *handle = NULL;
    KVL_H5(path, H5Fget_vfd_handle(file, H5P_DEFAULT, &handle), "reach the file driver");
    *d = handle;
done:
    return status;
}

kvl_status kvl_driver_apply(const char *path, hid_t file)
{
    kvl_status status = KVL_OK;
    struct driver *d = NULL;
    KVL_H5(path, H5Fflush(file, H5F_SCOPE_GLOBAL), "write to disk");
    KVL_TRY(driver_of(path, file, &d));
    if (d->broken == KVL_OK && !apply(d)) {
        d->error = errno;
        d->broken = KVL_E_IO;
    }
    if (d->broken != KVL_OK) status = broken_text(d, path);
done:
    return status;
}

kvl_status kvl_driver_sync(const char *path, hid_t file)
{
    kvl_status status = KVL_OK;
    struct driver *d = NULL;
    KVL_TRY(kvl_driver_apply(path, file));
    KVL_TRY(driver_of(path, file, &d));
    if (fdatasync(d->fd) != 0) {
        d->error = errno;
        d->broken = KVL_E_IO;
        status = broken_text(d, path);
    }
done:
    return status;
}

kvl_status kvl_driver_access(const char *path, hid_t *access_list)
{
    static hid_t driver_id = H5I_INVALID_HID;
    kvl_status status = KVL_OK;
    if (H5Iget_type(driver_id) != H5I_VFL) KVL_H5(path, driver_id = H5FDregister(&driver_class), "register the file driver");
    KVL_H5(path, *access_list = H5Pcreate(H5P_FILE_ACCESS), "make file properties");
    KVL_H5(path, H5Pset_fclose_degree(*access_list, H5F_CLOSE_SEMI), "set the close degree");
    KVL_H5(path, H5Pset_driver(*access_list, driver_id, NULL), "select the file driver");
done:
    return status;
}

kvl_status kvl_driver_creation(const char *path, hid_t creation_list)
{
    enum { INDEX_HALF = 62 }; /* a node of 2 x 62 chunks is 4016 bytes */
    kvl_status status = KVL_OK;
    KVL_H5(path, H5Pset_file_space_strategy(creation_list, H5F_FSPACE_STRATEGY_NONE, false, 1), "set the strategy of file space");
    KVL_H5(path, H5Pset_istore_k(creation_list, INDEX_HALF), "set the size of index nodes");
done:
    return status;
}

kvl_status kvl_driver_open(const char *path, hid_t *file)
{
    kvl_status status = KVL_OK;
    hid_t access_list = H5I_INVALID_HID;
    KVL_TRY(kvl_driver_access(path, &access_list));
    KVL_H5(path, *file = H5Fopen(path, H5F_ACC_RDWR, access_list), "open the run file");
done:
    kvl_h5_close(&access_list);
    return status;
}
