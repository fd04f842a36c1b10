/* Tunables: what may be chosen for a kernel, and what was chosen for a device.
 *
 * A kernel's tunables, their legal values and its constraints stand beside its source, in cl/<kernel>.tune. Values found by
 * `kvlab tune` stand in data/tune/<any>.txt (embedded) and in the user's file; formats: data/tune/README.md. A device gets, kernel
 * by kernel, the first of: an entry for it and its driver, for its family, for its vendor, the built-in defaults; a user's entry comes
 * before an embedded one of the same step. Under $KVLAB_MASK all values are built-in: entries were measured with other kernels.
 *
 * A tunable that `reorders` changes the order of floating-point sums, hence last bits; exact sessions use its default. What is
 * stored in a cache, weights included, has no tunables. */
#ifndef KVL_TUNING_H
#define KVL_TUNING_H
#include "device.h"
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvl_text;

enum { KVL_TUNE_KERNELS = 8, KVL_TUNE_TUNABLES = 16, KVL_TUNE_VALUES = 8, KVL_TUNE_RULES = 12, KVL_TUNE_TRIES = 4 };

struct kvl_tunable {
    char name[16];
    struct {
        char word[12];
        int64_t number; /* of a word that is no number: its place in the list */
    } value[KVL_TUNE_VALUES];
    size_t n_values; /* the first is the default */
    bool is_word;    /* its values are no numbers: the host's choice, no define */
    bool reorders;
};

struct kvl_tune_rule {
    enum kvl_tune_limit {
        KVL_TUNE_MULTIPLE, /* the first term is a multiple of the second */
        KVL_TUNE_LOCAL,    /* the sum of all terms fits the device's local memory */
        KVL_TUNE_ITEMS     /* the term is at most a work-group */
    } limit;
    char term[4][32]; /* products like "4*cols*tile" */
    size_t n_terms;
};

struct kvl_tune_kernel {
    char name[16], metric[16];
    struct kvl_tunable tunable[KVL_TUNE_TUNABLES];
    struct kvl_tune_rule rule[KVL_TUNE_RULES];
    const char *attempt[KVL_TUNE_TRIES]; /* settings to begin a search from besides the defaults, to the end of the line; borrowed */
    size_t n_tunables, n_rules, n_attempts;
};

/* All kernels with tunables, in the order of their names. */
const struct kvl_tune_kernel *kvl_tune_kernels(size_t *n);
const struct kvl_tune_kernel *kvl_tune_kernel_find(const char *name); /* NULL if there is none */

/* ---- a choice for each tunable of a kernel ---- */

struct kvl_setting {
    uint8_t choice[KVL_TUNE_TUNABLES]; /* index among the legal values: zeros are the defaults */
};

/* "cols=96 tile=4", unnamed ones by default, up to the end of the line. KVL_E_FORMAT with the reason. */
kvl_status kvl_setting_parse(const struct kvl_tune_kernel *kernel, const char *text, struct kvl_setting *out);
/* All tunables as such text. */
kvl_status kvl_setting_print(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, struct kvl_text *text);
/* KVL_E_FORMAT names the constraint that a setting breaks. caps: of the device; NULL = any. */
kvl_status kvl_setting_check(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const struct kvl_caps *caps);
int64_t kvl_setting_value(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const char *tunable);
/* Does it differ from the defaults in a tunable that reorders? */
bool kvl_setting_reorders(const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting);

/* ---- the settings of a device ---- */

struct kvl_tuning {
    struct kvl_setting setting[KVL_TUNE_KERNELS]; /* in the order of kvl_tune_kernels */
    char source[KVL_TUNE_KERNELS][400];           /* "built-in", "family pocl, data/tune/pocl.txt" */
};

/* Reads the user's file and the embedded entries. What is wrong in a file is warned of and ignored. */
kvl_status kvl_tuning_lookup(const struct kvl_caps *caps, struct kvl_tuning *out);

/* The value of a tunable; tuning NULL or a tunable that reorders with `exact`: the default. Both names must exist. */
int64_t kvl_tuned(const struct kvl_tuning *tuning, const char *kernel, const char *tunable, bool exact);
/* " -DKVL_<KERNEL>_<TUNABLE>=<value>" in capitals, for each tunable with numbers. */
kvl_status kvl_tuned_defines(const struct kvl_tuning *tuning, const char *kernel, bool exact, struct kvl_text *text);

/* The settings in use on a device. Programs and objects take them when they are made; a change is for those made later. */
const struct kvl_tuning *kvl_device_tuning(const struct kvl_device *device);
void kvl_device_tune(struct kvl_device *device, const struct kvl_tune_kernel *kernel, const struct kvl_setting *setting, const char *source);

/* All settings at once, as kvl_device_tuning gave them. */
void kvl_device_restore(struct kvl_device *device, const struct kvl_tuning *tuning);

/* ---- the user's file ---- */

/* $KVLAB_TUNE_FILE, else $XDG_CONFIG_HOME/kvlab/tune.txt, else ~/.config/kvlab/tune.txt; "" if $KVLAB_TUNE_FILE is empty: none. */
kvl_status kvl_tuning_path(char *path, size_t size);
/* Puts an entry for exactly this device and driver into a file in place of an older one; other lines stay. comment: one line. The file
 * is written aside and renamed. */
kvl_status kvl_tuning_save(const char *path, const struct kvl_caps *caps, const struct kvl_tune_kernel *kernel,
                           const struct kvl_setting *setting, const char *comment);

#endif
