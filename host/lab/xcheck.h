/* Offline compilation of all kernels for GPUs that are not here: does a text build, does it spill, how many work-items fit?
 *
 * The texts are those that the host would build on a GPU (KVL_WG 64, local memory shared by a tile). What the compilers say is one
 * row a program, target and kernel; a committed table of such rows is what later runs are compared with. A program whose text and
 * compiler are those of the table is not compiled again. */
#ifndef KVL_XCHECK_H
#define KVL_XCHECK_H
#include "status.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- programs ---- */

struct kvl_xcheck_program {
    char name[96], digest[17]; /* digest: first half of the sha256 of what a GPU takes of the text */
    char *text;                /* options are #defines at its top */
};

/* Cache kernels: every codec as K and V, and one mixed pair, x head_dim 64 and 128 x store, attention of 1 and of a tile of tokens.
 * Products: every weight type x kernel file x options. Then the kernels that depend on nothing. */
kvl_status kvl_xcheck_programs(struct kvl_xcheck_program **out, size_t *n);
void kvl_xcheck_programs_free(struct kvl_xcheck_program **programs, size_t n);

/* ---- rows ---- */

enum kvl_xcheck_verdict { KVL_XCHECK_FINE, KVL_XCHECK_KNOWN_FAILURE, KVL_XCHECK_WORSE, KVL_XCHECK_VERDICTS };
extern const char *const kvl_xcheck_verdict_name[KVL_XCHECK_VERDICTS];

struct kvl_xcheck_row {
    char program[96], digest[17], target[16], kernel[64]; /* kernel "" if the program failed */
    bool failed;
    uint32_t group, lanes;  /* work-items a group (64 assumed where a kernel does not say), and that run in step */
    uint32_t registers;     /* of a work-item, 4 bytes each; Intel: of a thread */
    uint32_t spills;        /* values that did not fit, as the compiler counts */
    uint64_t private_bytes; /* stack of a work-item, spills included */
    uint64_t local_bytes;   /* static local memory of a group */
    uint32_t occupancy;     /* estimate: % of a compute unit's work-item slots that are in use */

    /* of this run, not in the table */
    char note[256]; /* why it failed */
    bool is_new;    /* compiled now */
    enum kvl_xcheck_verdict verdict;
    uint32_t table_spills;
};

struct kvl_xcheck_rows {
    struct kvl_xcheck_row *row;
    size_t n, room;
};
kvl_status kvl_xcheck_rows_add(struct kvl_xcheck_rows *rows, const struct kvl_xcheck_row *row);
void kvl_xcheck_rows_free(struct kvl_xcheck_rows *rows);

/* ---- targets and compilers ---- */

enum kvl_xcheck_vendor { KVL_XCHECK_NVIDIA, KVL_XCHECK_AMD, KVL_XCHECK_INTEL, KVL_XCHECK_VENDORS };
extern const char *const kvl_xcheck_vendor_name[KVL_XCHECK_VENDORS];

/* A compute unit, as far as it limits how many work-items it holds. */
struct kvl_xcheck_target {
    const char *name, *machine; /* machine: what its compiler calls it */
    enum kvl_xcheck_vendor vendor;
    uint32_t simds, waves_a_simd;     /* a wave is what runs in step */
    uint32_t simd_registers, granule; /* a lane's that the waves of a SIMD share, and the unit they are given in; 0 = no limit */
    uint32_t groups;
    uint64_t local_bytes, group_local_bytes;
};
extern const struct kvl_xcheck_target kvl_xcheck_targets[];
extern const size_t kvl_xcheck_n_targets;

struct kvl_xcheck_compiler {
    char version[160]; /* one line without commas */
    char missing[160]; /* why there is none; "" if there is one */
    char ptx_only[96]; /* NVIDIA: why only the first half is compiled, "" if all is */
    char clang[256], library[256], assembler[256];
};
/* Looks for the compilers. dir: a folder for temporary files. */
kvl_status kvl_xcheck_find_compiler(enum kvl_xcheck_vendor vendor, const char *dir, struct kvl_xcheck_compiler *out);

/* Compiles a program for all targets of a vendor, in dir, which must be empty and exist. A text that does not build is a row, not
 * an error. */
kvl_status kvl_xcheck_compile(const struct kvl_xcheck_program *program, enum kvl_xcheck_vendor vendor,
                              const struct kvl_xcheck_compiler *compiler, const char *dir, struct kvl_xcheck_rows *rows);

/* What the compilers print; each appends one row a kernel, with target's name and occupancy filled in. source: the program's text.
 */
kvl_status kvl_xcheck_parse_nvidia(const struct kvl_xcheck_target *target, const char *source, const char *log,
                                   struct kvl_xcheck_rows *rows);
kvl_status kvl_xcheck_parse_amd(const struct kvl_xcheck_target *target, const char *assembly, struct kvl_xcheck_rows *rows);
kvl_status kvl_xcheck_parse_intel(const struct kvl_xcheck_target *target, const char *binary, size_t size, const char *log,
                                  struct kvl_xcheck_rows *rows);

/* ---- the table ---- */

struct kvl_xcheck_table {
    char version[KVL_XCHECK_VENDORS][160];
    struct kvl_xcheck_rows rows;
};
/* A file that is not there is an empty table. */
kvl_status kvl_xcheck_table_read(const char *path, struct kvl_xcheck_table *out);
kvl_status kvl_xcheck_table_write(const char *path, const struct kvl_xcheck_table *table);
void kvl_xcheck_table_free(struct kvl_xcheck_table *table);

/* ---- the check ---- */

struct kvl_xcheck_options {
    int vendor;        /* -1 = all */
    const char *match; /* programs whose name contains it; NULL = all */
    const char *table; /* path */
    bool fresh;        /* compile what the table already has, too */
    bool update;       /* write the table; nothing is worse then */
};

struct kvl_xcheck_report {
    struct kvl_xcheck_compiler compiler[KVL_XCHECK_VENDORS];
    bool is_wanted[KVL_XCHECK_VENDORS];
    bool other_compiler[KVL_XCHECK_VENDORS]; /* than the table's: spills are not compared */
    struct kvl_xcheck_rows rows;
    size_t n_programs, n_worse;
};

/* KVL_OK also if rows are worse: the caller looks at n_worse. KVL_SKIP if no compiler is here. */
kvl_status kvl_xcheck_run(const struct kvl_xcheck_options *options, struct kvl_xcheck_report *out);
void kvl_xcheck_report_free(struct kvl_xcheck_report *report);

#endif
