/* Weight formats: one row a tensor type, and the C reference dequantizers (the specification of cl/weight/). */
#ifndef KVL_QUANT_H
#define KVL_QUANT_H
#include "status.h"
#include <stddef.h>
#include <stdint.h>

struct kvl_quant_type {
    const char *name;      /* "Q4_1" */
    uint32_t gguf_type;
    uint32_t block, bytes; /* elements and bytes of one block; a row is a whole number of blocks */
    /* n_blocks blocks at `in` (any alignment) to floats. */
    void (*dequantize)(const uint8_t *in, size_t n_blocks, float *out);
    const char *device_source; /* embedded text name, "cl/weight/q4_1.cl" */
};

/* NULL if kvlab does not know the type. */
const struct kvl_quant_type *kvl_quant_type(uint32_t gguf_type);
extern const struct kvl_quant_type kvl_quant_types[];
extern const size_t kvl_n_quant_types;

#endif
