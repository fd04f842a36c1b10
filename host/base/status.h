/* Status codes and the one error message of a failing call.
 *
 * Every fallible function returns kvl_status: 0 is success, negative is an error, positive is a reason to skip.
 * The function that knows what went wrong calls kvl_fail() with a text that says what was wanted, what was found
 * and what to change; callers only pass the code on. The first message wins until kvl_error_clear(). */
#ifndef KVL_STATUS_H
#define KVL_STATUS_H
#include <stdint.h>

typedef int32_t kvl_status;

enum {
    KVL_OK            = 0,
    KVL_E_USAGE       = -1,  /* the caller's words are wrong: option, spec, argument */
    KVL_E_IO          = -2,  /* open, read, write, rename; errno is in the text */
    KVL_E_FORMAT      = -3,  /* content of a file is not what its format says */
    KVL_E_MEMORY      = -4,  /* host memory */
    KVL_E_DEVICE      = -5,  /* an OpenCL call failed; its name and code are in the text */
    KVL_E_DEVICE_MEM  = -6,  /* device memory, or a buffer above the device's limits */
    KVL_E_HDF5        = -7,
    KVL_E_VERIFY      = -8,  /* a result differs from its reference */
    KVL_E_UNSUPPORTED = -9,  /* legal input that kvlab (or this plug-in) does not handle */
    KVL_E_INTERRUPTED = -10, /* Ctrl-C */
    KVL_SKIP          = 1    /* not applicable here; the text says why */
};

/* Exit codes of the program (documented in README and --help). */
enum { KVL_EXIT_OK = 0, KVL_EXIT_ERROR = 1, KVL_EXIT_USAGE = 2, KVL_EXIT_VERIFY = 3, KVL_EXIT_DEVICE = 4, KVL_EXIT_SKIP = 77 };

/* Stores the message (unless one is already stored) and returns `code`. */
kvl_status kvl_fail(kvl_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The stored message, "" if none. Valid until the next kvl_fail or kvl_error_clear. Per thread. */
const char *kvl_error_text(void);
void kvl_error_clear(void);

/* The exit code that belongs to a status. */
int kvl_exit_code(kvl_status status);

/* For functions with `kvl_status status = KVL_OK;` and one cleanup label `done:`. */
#define KVL_TRY(call)                                                                                                  \
    do {                                                                                                               \
        status = (call);                                                                                               \
        if (status != KVL_OK) goto done;                                                                               \
    } while (0)

#endif
