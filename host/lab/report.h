/* A report: run files, as one HTML page that needs nothing else. The page, its script and Chart.js are in report/. */
#ifndef KVL_REPORT_H
#define KVL_REPORT_H
#include "runtable.h"

/* Writes the page; whoever reads `out` meanwhile sees the old one. A file that cannot be read is named in a warning and left out; *n_bad
 * counts them. */
kvl_status kvl_report_write(const struct kvl_run_paths *paths, const char *out, size_t *n_bad);

#endif
