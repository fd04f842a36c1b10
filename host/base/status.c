#include "status.h"
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char error_text[1024];

kvl_status kvl_fail(kvl_status code, const char *format, ...)
{
    if (error_text[0] == '\0') {
        va_list args;
        va_start(args, format);
        vsnprintf(error_text, sizeof error_text, format, args);
        va_end(args);
    }
    return code;
}

const char *kvl_error_text(void) { return error_text; }

void kvl_error_clear(void) { error_text[0] = '\0'; }

int kvl_exit_code(kvl_status status)
{
    switch (status) {
    case KVL_OK: return KVL_EXIT_OK;
    case KVL_E_USAGE: return KVL_EXIT_USAGE;
    case KVL_E_VERIFY: return KVL_EXIT_VERIFY;
    case KVL_E_DEVICE:
    case KVL_E_DEVICE_MEM: return KVL_EXIT_DEVICE;
    default: return status > 0 ? KVL_EXIT_SKIP : KVL_EXIT_ERROR;
    }
}
