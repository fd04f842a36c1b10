/* Does this device compute what the C references say? Every codec, attention, every weight type, norm and rotation, on small
 * inputs. */
#ifndef KVL_SELFCHECK_H
#define KVL_SELFCHECK_H
#include "device.h"
#include "status.h"
#include <stdbool.h>

struct kvl_check {
    char name[96];
    double difference, allowed; /* the largest found; NaN if a result is one */
    bool ok;
};
typedef void (*kvl_check_fn)(void *context, const struct kvl_check *check);

/* Calls fn after each check and goes on after a failed one. KVL_E_VERIFY if any failed. With n_codecs > 0 only the codecs of these names are
 * checked, KVL_E_USAGE if there is none of one. Blocks. */
kvl_status kvl_selfcheck(struct kvl_device *device, size_t n_codecs, char *const *codecs, kvl_check_fn fn, void *context);

#endif
