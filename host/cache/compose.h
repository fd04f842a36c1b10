/* Program text of the cache kernels for one layer: integers, contract, K body, V body, kernels. */
#ifndef KVL_COMPOSE_H
#define KVL_COMPOSE_H
#include "device.h"
#include "plan.h"
#include "text.h"

/* tile: query tokens that share a read. Names of the kernels: cl/cache.cl. */
kvl_status kvl_compose_program(struct kvl_device *device, const struct kvl_cache_plan *plan, const struct kvl_layer_plan *layer, uint32_t tile,
                               struct kvl_program **out);
/* Query tokens of a prefill tile for these dims. */
uint32_t kvl_prefill_tile(const struct kvl_cache_dims *dims);

#endif
