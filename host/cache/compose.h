/* Program text of the cache kernels for one layer: integers, contract, K body, V body, kernels. */
#ifndef KVL_COMPOSE_H
#define KVL_COMPOSE_H
#include "device.h"
#include "plan.h"
#include "text.h"

/* The parts of a program's text; it owns what was written for it. */
enum { KVL_COMPOSITION_PARTS = 9 };
struct kvl_composition {
    struct kvl_text sizes, bodies;
    struct kvl_source parts[KVL_COMPOSITION_PARTS];
};
/* What the text is specialised for. */
struct kvl_compose_target {
    bool grouped; /* vectors are work-items, and a group of them shares a tile */
    bool vectors; /* vectors are registers: bodies work on float16 (KVL_VECTORS) */
};
struct kvl_compose_target kvl_compose_target_of(const struct kvl_caps *caps);

/* Needs no device. kernels: "store.cl", "attend.cl", "pages.cl", "evict.cl" or "gather.cl". tile: query tokens that share a read. */
kvl_status kvl_compose(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, const char *kernels, uint32_t tile,
                       struct kvl_compose_target target, struct kvl_composition *out);
void kvl_composition_free(struct kvl_composition *composition);

/* The same, built for a device. */
kvl_status kvl_compose_program(struct kvl_device *device, const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer,
                               const char *kernels, uint32_t tile, struct kvl_program **out);
/* Whether attention of `tile` tokens can take their append in. */
bool kvl_compose_appends(const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, uint32_t tile, struct kvl_compose_target target);
/* Work-items that score `pages` pages of a stream (cl/pages.cl), whole groups of them. */
size_t kvl_compose_page_items(uint32_t pages, size_t group);
/* Work-items that share a tile. */
uint32_t kvl_compose_group(const struct kvl_cache_plan *plan, struct kvl_compose_target target);

#endif
