/* The run file's HDF5 helpers: see runfile_hdf5.h. */
#include "runfile_hdf5.h"
#include "mem.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void kvl_h5_quiet(void) { H5Eset_auto2(H5E_DEFAULT, NULL, NULL); }

/* The innermost message of the error stack, and the errno that a file driver wrote into one of them. */
struct reason {
    char text[256];
    int error;
};

static herr_t reason_visit(unsigned n, const H5E_error2_t *entry, void *data)
{
    struct reason *reason = data;
    const char *number = strstr(entry->desc, "errno = ");
    if (n == 0) snprintf(reason->text, sizeof reason->text, "%s", entry->desc);
    if (number != NULL && reason->error == 0) reason->error = atoi(number + strlen("errno = "));
    return 0;
}

static const struct {
    int error;
    const char *text;
} known_reasons[] = {
    {ENOSPC, "the disk is full; free some space"},
    {EDQUOT, "the disk quota is used up; free some space"},
    {EFBIG, "the file-size limit is reached (ulimit -f)"},
    {EAGAIN, "another process has it open"},
    {EEXIST, "it exists already; a run is writing it, or one died: finish it with `kvlab log repair`, or remove it"},
};

const char *kvl_reason_text(int error)
{
    for (size_t i = 0; i < sizeof known_reasons / sizeof *known_reasons; i++)
        if (known_reasons[i].error == error) return known_reasons[i].text;
    return strerror(error);
}

kvl_status kvl_h5_fail(const char *path, const char *format, ...)
{
    struct reason reason = {{0}, 0};
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, reason_visit, &reason);
    H5Eclear2(H5E_DEFAULT);
    const kvl_status code = reason.error == 0 ? KVL_E_HDF5 : reason.error == ENOMEM ? KVL_E_MEMORY : KVL_E_IO;
    if (reason.error != 0) return kvl_fail(code, "%s: cannot %s: %s", path, what, kvl_reason_text(reason.error));
    return kvl_fail(code, "%s: cannot %s: %s", path, what, reason.text[0] ? reason.text : "unknown reason");
}

void kvl_h5_close(hid_t *id)
{
    if (*id >= 0) H5Idec_ref(*id);
    *id = H5I_INVALID_HID;
}

/* Table 3-7 of the Unicode standard: well-formed byte sequences. Third and fourth bytes are 80..bf. */
static size_t utf8_length(const unsigned char *s, size_t n)
{
    static const struct {
        unsigned char first, last, second_first, second_last, length;
    } forms[] = {{0x00, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
                 {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
                 {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (s[0] < forms[i].first || s[0] > forms[i].last) continue;
        if (forms[i].length > n) return 0;
        if (forms[i].length > 1 && (s[1] < forms[i].second_first || s[1] > forms[i].second_last)) return 0;
        for (size_t k = 2; k < forms[i].length; k++)
            if ((s[k] & 0xc0) != 0x80) return 0;
        return forms[i].length;
    }
    return 0;
}

void kvl_utf8_copy(char *out, const char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        const size_t length = utf8_length((const unsigned char *)text + i, n - i);
        if (length == 0)
            out[i] = '?';
        else
            memcpy(out + i, text + i, length);
        i += length == 0 ? 1 : length;
    }
}

/* Opens an attribute for writing if it is a fixed-length text of at least `size` bytes; else removes it. */
static kvl_status reuse_attribute(const char *path, hid_t object, const char *name, size_t size, hid_t *attribute, hid_t *type)
{
    kvl_status status = KVL_OK;
    const htri_t exists = H5Aexists(object, name);
    KVL_H5(path, exists, "look up attribute %s", name);
    if (!exists) goto done;
    KVL_H5(path, *attribute = H5Aopen(object, name, H5P_DEFAULT), "open attribute %s", name);
    KVL_H5(path, *type = H5Aget_type(*attribute), "read the type of attribute %s", name);
    if (size > 0 && H5Tget_class(*type) == H5T_STRING && H5Tis_variable_str(*type) == 0 && H5Tget_size(*type) >= size) goto done;
    kvl_h5_close(type);
    kvl_h5_close(attribute);
    KVL_H5(path, H5Adelete(object, name), "replace attribute %s", name);
done:
    return status;
}

static kvl_status create_attribute(const char *path, hid_t object, const char *name, hid_t type, hid_t *attribute)
{
    kvl_status status = KVL_OK;
    hid_t space = H5I_INVALID_HID;
    KVL_H5(path, space = H5Screate(H5S_SCALAR), "describe attribute %s", name);
    KVL_H5(path, *attribute = H5Acreate2(object, name, type, space, H5P_DEFAULT, H5P_DEFAULT), "create attribute %s", name);
done:
    kvl_h5_close(&space);
    return status;
}

static kvl_status text_type(const char *path, size_t size, hid_t *type)
{
    kvl_status status = KVL_OK;
    KVL_H5(path, *type = H5Tcopy(H5T_C_S1), "make a text type");
    KVL_H5(path, H5Tset_size(*type, size), "make a text type of %zu bytes", size);
    KVL_H5(path, H5Tset_cset(*type, H5T_CSET_UTF8), "make a UTF-8 type");
done:
    return status;
}

kvl_status kvl_h5_set_text(const char *path, hid_t object, const char *name, const char *value, size_t room)
{
    kvl_status status = KVL_OK;
    hid_t attribute = H5I_INVALID_HID, type = H5I_INVALID_HID;
    const size_t n = strlen(value);
    size_t size = n + 1 > room ? n + 1 : room;
    char *text = NULL;
    KVL_TRY(reuse_attribute(path, object, name, n + 1, &attribute, &type));
    if (attribute >= 0) {
        size = H5Tget_size(type);
    } else {
        KVL_TRY(text_type(path, size, &type));
        KVL_TRY(create_attribute(path, object, name, type, &attribute));
    }
    KVL_TRY(kvl_alloc(&text, size, 1));
    kvl_utf8_copy(text, value, n);
    KVL_H5(path, H5Awrite(attribute, type, text), "write attribute %s", name);
done:
    kvl_free(&text);
    kvl_h5_close(&type);
    kvl_h5_close(&attribute);
    return status;
}

kvl_status kvl_h5_set_number(const char *path, hid_t object, const char *name, hid_t type, const void *value)
{
    kvl_status status = KVL_OK;
    hid_t attribute = H5I_INVALID_HID, old_type = H5I_INVALID_HID;
    KVL_TRY(reuse_attribute(path, object, name, 0, &attribute, &old_type));
    KVL_TRY(create_attribute(path, object, name, type, &attribute));
    KVL_H5(path, H5Awrite(attribute, type, value), "write attribute %s", name);
done:
    kvl_h5_close(&old_type);
    kvl_h5_close(&attribute);
    return status;
}

kvl_status kvl_h5_get_text(const char *path, hid_t object, const char *name, char *value, size_t size)
{
    kvl_status status = KVL_OK;
    hid_t attribute = H5I_INVALID_HID, type = H5I_INVALID_HID, space = H5I_INVALID_HID;
    if (H5Aexists(object, name) <= 0) {
        status = kvl_fail(KVL_E_FORMAT, "%s: attribute %s is missing: not a run file of kvlab", path, name);
        goto done;
    }
    KVL_H5(path, attribute = H5Aopen(object, name, H5P_DEFAULT), "open attribute %s", name);
    KVL_H5(path, type = H5Aget_type(attribute), "read the type of attribute %s", name);
    KVL_H5(path, space = H5Aget_space(attribute), "read the shape of attribute %s", name);
    if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) != 0 || H5Tget_size(type) >= size ||
        H5Sget_simple_extent_npoints(space) != 1) {
        status =
            kvl_fail(KVL_E_FORMAT, "%s: attribute %s is not a text under %zu bytes: not a run file of kvlab", path, name, size);
        goto done;
    }
    memset(value, 0, size);
    KVL_H5(path, H5Aread(attribute, type, value), "read attribute %s", name);
done:
    kvl_h5_close(&space);
    kvl_h5_close(&type);
    kvl_h5_close(&attribute);
    return status;
}

kvl_status kvl_h5_set_rows(const char *path, hid_t dataset, const char *name, uint64_t rows)
{
    kvl_status status = KVL_OK;
    hsize_t dims[KVL_MAX_RANK] = {0};
    hid_t space = H5I_INVALID_HID;
    KVL_H5(path, space = H5Dget_space(dataset), "read the shape of %s", name);
    const int rank = H5Sget_simple_extent_ndims(space);
    if (rank < 1 || rank > KVL_MAX_RANK) {
        status = kvl_fail(KVL_E_FORMAT, "%s: %s has %d axes, a column has 1 to %d", path, name, rank, KVL_MAX_RANK);
        goto done;
    }
    KVL_H5(path, H5Sget_simple_extent_dims(space, dims, NULL), "read the shape of %s", name);
    dims[0] = rows;
    KVL_H5(path, H5Dset_extent(dataset, dims), "set %s to %llu rows", name, (unsigned long long)rows);
done:
    kvl_h5_close(&space);
    return status;
}

static kvl_status sync_path(const char *path)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return kvl_fail(KVL_E_IO, "%s: cannot open: %s", path, strerror(errno));
    const int error = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    if (error != 0) return kvl_fail(KVL_E_IO, "%s: cannot write to disk: %s", path, kvl_reason_text(error));
    return KVL_OK;
}

kvl_status kvl_folder_sync(const char *path)
{
    char folder[KVL_PATH_MAX];
    const char *slash = strrchr(path, '/');
    const size_t n = slash == NULL ? 0 : (size_t)(slash - path);
    if (n >= sizeof folder) return kvl_fail(KVL_E_IO, "%s: path too long", path);
    if (slash == NULL)
        snprintf(folder, sizeof folder, ".");
    else
        snprintf(folder, sizeof folder, "%.*s", n == 0 ? 1 : (int)n, path);
    return sync_path(folder);
}

kvl_status kvl_file_publish(const char *from, const char *to)
{
    kvl_status status = KVL_OK;
    if (access(to, F_OK) == 0) return kvl_fail(KVL_E_IO, "%s: cannot rename %s to it: it exists already", to, from);
    KVL_TRY(sync_path(from));
    if (rename(from, to) != 0) {
        status = kvl_fail(KVL_E_IO, "%s: cannot rename to %s: %s", from, to, strerror(errno));
        goto done;
    }
    KVL_TRY(kvl_folder_sync(to));
done:
    return status;
}
