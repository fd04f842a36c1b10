/* Two run files compared: configuration, bytes, quality by paired differences of the same chunks, speed. */
#ifndef KVL_RUNDIFF_H
#define KVL_RUNDIFF_H
#include "stats.h"
#include "status.h"
#include <stdbool.h>

struct kvl_diff_setting {
    char *name, *a, *b; /* owned; a or b NULL: that run does not say */
};

struct kvl_diff_number {
    char name[64], unit[16];
    double a, b;
    bool tested;                    /* the rest means something */
    struct kvl_interval difference; /* of b - a, 95 % */
    enum kvl_verdict verdict;       /* b against a */
    double largest;                 /* largest difference of a chunk, quality only */
};

struct kvl_diff_numbers {
    struct kvl_diff_number *item;
    size_t n;
};

struct kvl_diff {
    struct kvl_diff_setting *setting; /* that differ */
    size_t n_settings;
    struct kvl_diff_numbers bytes, quality, speed;
    double largest_logit; /* largest difference of a logit of the same window; NaN if the runs hold none (--logits) */
    size_t n_logits;      /* compared */
    char not_paired[256]; /* why quality is not tested; "" if it is */
};

struct cJSON;
/* a, b: trees of kvl_runfile_read with values. */
kvl_status kvl_runs_diff(const struct cJSON *a, const struct cJSON *b, struct kvl_diff *out);
void kvl_diff_free(struct kvl_diff *diff);

/* What the runs of one strategy on several devices share: all of /config but the device and what follows from it. Appends. */
struct kvl_text;
kvl_status kvl_run_strategy(const struct cJSON *run, struct kvl_text *out);

/* An attribute as text or number; NULL and NaN if it is not there. `group` "" is the root. */
const char *kvl_run_text(const struct cJSON *run, const char *group, const char *name);
double kvl_run_number(const struct cJSON *run, const char *group, const char *name);
/* Tokens a second of all steps of a phase; NaN if there are none. phase NULL: the first one of the file. */
double kvl_run_tokens_per_s(const struct cJSON *run, const char *phase);

#endif
