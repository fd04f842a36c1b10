#include "embedded.h"
#include <stddef.h>
#include <string.h>

const char *kvl_embedded_text(const char *path)
{
    for (const struct kvl_embedded *e = kvl_embedded; e->path != NULL; e++)
        if (strcmp(e->path, path) == 0) return e->text;
    return NULL;
}
