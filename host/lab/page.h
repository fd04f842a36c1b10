/* One HTML page with its data and scripts inside. */
#ifndef KVL_PAGE_H
#define KVL_PAGE_H
#include "status.h"
#include <cjson/cJSON.h>
#include <stddef.h>

struct kvl_page_part {
    const char *mark, *file; /* the mark in the page, and what stands there instead: a text that the program carries */
};

/* Writes the carried page `html` to `path` with @DATA@ replaced by `data` and then each mark by its part, in the order in which they stand in the
 * page. Whoever reads `path` meanwhile sees the old one. */
kvl_status kvl_page_write(const char *path, const char *html, const cJSON *data, const struct kvl_page_part *parts, size_t n_parts);

#endif
