/* Named specs (experiments/presets.yaml, embedded). */
#ifndef KVL_PRESETS_H
#define KVL_PRESETS_H
#include "slice.h"
#include "status.h"
#include <stdint.h>

struct kvl_preset {
    char *name, *kv, *source, *note; /* kv: the spec; note may be NULL */
};
struct kvl_presets {
    struct kvl_preset *preset;
    unsigned n; /* the type that libcyaml counts with */
};
kvl_status kvl_presets_load(struct kvl_presets *out);
void kvl_presets_free(struct kvl_presets *presets);
const struct kvl_preset *kvl_presets_find(const struct kvl_presets *presets, const struct kvl_slice *name);

#endif
