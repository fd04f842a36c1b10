/* The standard parts of a run file, filled from a session: configuration, device, memory, steps, kernels, summaries.
 * Also their JSON twin, so that both carry the same names. */
#ifndef KVL_RUNRECORD_H
#define KVL_RUNRECORD_H
#include "kerneltimes.h"
#include "runfile.h"
#include "session.h"
#include "text.h"
#include <cjson/cJSON.h>

struct kvl_fact { /* a named number */
    const char *name;
    double value;
    bool is_count; /* stored as an integer */
};

struct kvl_word { /* a named text */
    const char *name, *text;
};

struct kvl_record_table { /* a table of the command besides /steps and /kernels */
    const char *group;
    const struct kvl_column *columns;
    size_t n_columns;
};

struct kvl_record_config {
    const char *command; /* "eval ppl" */
    const char *output;  /* -o; NULL = runs/<command>-<time>-<hash>.h5 */
    bool no_file;        /* keep nothing: rows go nowhere, JSON still works */
    bool profile;        /* a /kernels table with the time of every launch */
    struct kvl_device *device;
    const struct kvl_model *model;
    const struct kvl_spec *spec, *base; /* base may be NULL */
    enum kvl_protocol protocol;
    uint32_t ubatch, n_ctx;
    uint32_t n_sequence; /* in step, 0 = 1 */
    bool exact;
    bool measures_loss;  /* evictions come with their losses */
    const char *text_sha256; /* NULL = the run has no text */
    const struct kvl_fact *settings; /* the command's own numbers: chunks, seed ... */
    size_t n_settings;
    const struct kvl_word *words;    /* and texts: lists, choices */
    size_t n_words;
    const struct kvl_record_table *table; /* NULL = none */
};

struct kvl_record;
/* Creates the file with everything known before the first step. */
kvl_status kvl_record_open(const struct kvl_record_config *config, struct kvl_record **out);

/* A row of /steps: n tokens went through `session` in duration_ns. before: the session's counters before the step (NULL: it was new
 * or reset). */
kvl_status kvl_record_step(struct kvl_record *record, struct kvl_session *session, const char *phase, uint64_t n_tokens,
                           uint64_t duration_ns, const struct kvl_counters *before);
/* Rows of /evictions and /evictions/positions: what the session's last prompt left of each layer and head. Nothing if the spec evicts nothing. */
kvl_status kvl_record_eviction(struct kvl_record *record, struct kvl_session *session);
/* The same of what layers that evict while tokens are decoded hold now. Blocks. */
kvl_status kvl_record_running(struct kvl_record *record, struct kvl_session *session);
/* A row of the command's table. */
kvl_status kvl_record_row(struct kvl_record *record, const union kvl_cell *cells);
/* /logits: of the first n scored tokens of a window. Once a file. */
kvl_status kvl_record_logits(struct kvl_record *record, uint64_t chunk, uint32_t n, uint32_t n_vocab, const float *logits);
/* A map of /layers, values [n_layer][n_stream]; nothing if all of it is NaN. */
kvl_status kvl_record_layer_map(struct kvl_record *record, const char *name, const char *long_name, uint32_t n_layer, uint32_t n_stream, const double *values);
/* Attributes of /quality. NaN (not defined for this run) is left out. */
kvl_status kvl_record_summary(struct kvl_record *record, const struct kvl_fact *facts, size_t n);
/* /memory: bytes by class and layer from the ledger, and the session's cache. Call while the sessions are alive, at their fullest.
 */
kvl_status kvl_record_memory(struct kvl_record *record, struct kvl_session *session);

/* Measures the device's peaks and keeps the better of these and of those before; nothing without config.profile. kvl_record_open does so too: one
 * more call behind what is timed, since a machine that is shared does not reach the same all the time. Blocks, about two seconds. */
kvl_status kvl_record_peaks(struct kvl_record *record);

/* Kernel times, the final CL source, the status of the run; then closes. status: what the run returned; returns it, or the error of
 * closing. Says the file's path on stderr; an interrupted or failed run keeps its rows under <path>.part. */
kvl_status kvl_record_close(struct kvl_record **record, kvl_status status);

/* The kernel times of the steps recorded so far, with the device's peaks; empty without config.profile. */
struct kvl_profile *kvl_record_profile(struct kvl_record *record);

/* The keys that every command's JSON has. Call after kvl_record_memory and before kvl_record_close. */
kvl_status kvl_record_json(const struct kvl_record *record, cJSON *object);
/* The arguments of this process, as a shell would take them again. Appends. */
kvl_status kvl_command_line(struct kvl_text *out);
/* Adds facts (NaN as null). */
kvl_status kvl_json_facts(cJSON *object, const struct kvl_fact *facts, size_t n);
/* Prints one object on stdout, and a newline. */
kvl_status kvl_json_print(const cJSON *object);

/* The lines every command's table has: model, device, cache, memory. */
void kvl_record_print(const struct kvl_record *record);

#endif
