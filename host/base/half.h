/* IEEE binary16 and bfloat16 conversions, round to nearest even. */
#ifndef KVL_HALF_H
#define KVL_HALF_H
#include <stdint.h>

float kvl_half_to_float(uint16_t h);
uint16_t kvl_float_to_half(float f); /* overflow gives infinity; NaN stays NaN */
float kvl_bf16_to_float(uint16_t b);

#endif
