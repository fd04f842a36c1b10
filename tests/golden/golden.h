/* The golden folder: answers of kvpress, one file a press. $KVLAB_GOLDEN names the folder, which must then be right, or it is
 * ../shared/golden if that is there; without one tests are skipped. Sizes, ratios and parameters are read from the files. */
#ifndef KVL_TEST_GOLDEN_H
#define KVL_TEST_GOLDEN_H
#include <hdf5.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* NULL: there is none, and nobody asked for one. */
static inline const char *golden_folder(void)
{
    const char *named = getenv("KVLAB_GOLDEN"), *folder = named ? named : KVL_ROOT "/../shared/golden";
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL); /* the messages are ours */
    return named || access(folder, R_OK) == 0 ? folder : NULL;
}

static inline hid_t golden_open(const char *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", golden_folder(), file);
    const hid_t id = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (id < 0) fprintf(stderr, "%s: not a file of golden answers; correct KVLAB_GOLDEN or unset it\n", path);
    return id;
}

/* A number among the file's attributes; false if there is none of this name. */
static inline bool golden_attribute(hid_t file, const char *name, double *out)
{
    const hid_t id = H5Aexists(file, name) > 0 ? H5Aopen(file, name, H5P_DEFAULT) : -1;
    const bool right = id >= 0 && H5Aread(id, H5T_NATIVE_DOUBLE, out) >= 0;
    if (id >= 0) H5Aclose(id);
    return right;
}

/* Numbers of a dataset that is in the file, 0 if it is not. */
static inline size_t golden_size(hid_t file, const char *name)
{
    const hid_t set = H5Dopen2(file, name, H5P_DEFAULT);
    if (set < 0) return 0;
    const hid_t space = H5Dget_space(set);
    const hssize_t n = H5Sget_simple_extent_npoints(space);
    H5Sclose(space);
    H5Dclose(set);
    return (size_t)n;
}

/* The whole dataset, allocated; NULL and a message if it has not `n` numbers (0: any). */
static inline void *golden_read(hid_t file, const char *name, hid_t type, size_t n)
{
    const size_t found = golden_size(file, name);
    if (found == 0 || (n != 0 && found != n)) {
        fprintf(stderr, "dataset %s: %zu numbers, not %zu\n", name, found, n);
        return NULL;
    }
    void *numbers = malloc(found * H5Tget_size(type));
    const hid_t set = H5Dopen2(file, name, H5P_DEFAULT);
    if (H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, numbers) < 0) {
        free(numbers);
        numbers = NULL;
    }
    H5Dclose(set);
    return numbers;
}

/* ---- presses as specs ---- */

/* {name} is the file's attribute, {name?a:b} is a if the attribute is not 0, {r} the ratio. */
struct golden_press {
    const char *name, *keep, *budget;
    const char *pos; /* NULL: keep */
};
static const struct golden_press golden_presses[] = {
    {"snapkv", "snapkv(window={window_size},kernel={kernel_size})", "uniform(removed={r})"},
    {"pyramidkv", "snapkv(window={window_size},kernel={kernel_size})", "pyramid(removed={r},beta={beta},window={window_size})"},
    {"adakv_snapkv", "snapkv(window={inner_window_size},kernel={inner_kernel_size})", "ada(removed={r},safeguard={alpha_safeguard})"},
    {"adakv_expected_attention", "expected(future={inner_n_future_positions},sink={inner_n_sink},{inner_use_covariance?cov:nocov},"
                                 "{inner_use_vnorm?vnorm:plain},epsilon={inner_epsilon})",
     "ada(removed={r},safeguard={alpha_safeguard})"},
    {"expected_attention",
     "expected(future={n_future_positions},sink={n_sink},{use_covariance?cov:nocov},{use_vnorm?vnorm:plain},epsilon={epsilon})",
     "uniform(removed={r})"},
    {"expected_attention_nocov",
     "expected(future={n_future_positions},sink={n_sink},{use_covariance?cov:nocov},{use_vnorm?vnorm:plain},epsilon={epsilon})",
     "uniform(removed={r})"},
    {"tova", "tova", "uniform(removed={r})"},
    {"knorm", "knorm", "uniform(removed={r})"},
    {"streamingllm", "streaming(sink={n_sink})", "uniform(removed={r})"},
    {"observed_attention", "observed", "uniform(removed={r})"},
    {"keydiff", "keydiff", "uniform(removed={r})"},
    {"lagkv", "lagkv(sink={n_sink},lag={lag_size},{cross_scoring?cross:within})", "uniform(removed={r})"},
    {"lagkv_cross", "lagkv(sink={n_sink},lag={lag_size},{cross_scoring?cross:within})", "uniform(removed={r})"},
    {"cur", "cur(sink={num_sinks},window={local_window_size})", "uniform(removed={r})"},
    {"leverage", "leverage(sketch={sketch_dimension})", "uniform(removed={r})"},
    {"noncausal_attn", "noncausal(chunk={chunk_size})", "uniform(removed={r})"},
    {"chunkkv_snapkv", "chunk(of=snapkv(window={inner_window_size},kernel={inner_kernel_size}),size={chunk_length})", "uniform(removed={r})"},
    {"criticalkv_snapkv",
     "critical(of=snapkv(window={inner_window_size},kernel={inner_kernel_size}),epsilon={epsilon},first={first_stage_ratio})",
     "uniform(removed={r})"},
    {"criticaladakv_snapkv",
     "critical(of=snapkv(window={inner_window_size},kernel={inner_kernel_size}),epsilon={epsilon},first={first_stage_ratio})",
     "ada(removed={r},safeguard={alpha_safeguard})"},
    {"keyrerotation_snapkv", "snapkv(window={inner_window_size},kernel={inner_kernel_size})", "uniform(removed={r})", "compact"},
    {"keyrerotation_streamingllm", "streaming(sink={inner_n_sink})", "uniform(removed={r})", "compact"},
};
enum { GOLDEN_PRESSES = sizeof golden_presses / sizeof *golden_presses };

/* Replaces every {...} of text. False if the file lacks an attribute. */
static inline bool golden_expand(hid_t file, const char *text, double ratio, char *out, size_t size)
{
    size_t n = 0;
    while (*text != '\0' && n + 1 < size) {
        const char *end = *text == '{' ? strchr(text, '}') : NULL;
        if (end == NULL) {
            out[n++] = *text++;
            continue;
        }
        char name[64];
        double value = ratio;
        const size_t length = strcspn(text + 1, "?}");
        snprintf(name, sizeof name, "%.*s", (int)length, text + 1);
        if (strcmp(name, "r") != 0 && !golden_attribute(file, name, &value)) return false;
        if (text[1 + length] == '?') {
            const char *yes = text + 2 + length, *colon = strchr(yes, ':'), *word = value != 0.0 ? yes : colon + 1;
            n += (size_t)snprintf(out + n, size - n, "%.*s", (int)(value != 0.0 ? colon - word : end - word), word);
        } else {
            n += (size_t)snprintf(out + n, size - n, "%.17g", value);
        }
        text = end + 1;
    }
    out[n] = '\0';
    return true;
}

/* keep=... budget=... pos=... of a press at a ratio. */
static inline bool golden_spec(hid_t file, const struct golden_press *press, double ratio, char *out, size_t size)
{
    char text[512];
    snprintf(text, sizeof text, "keep=%s budget=%s pos=%s", press->keep, press->budget, press->pos ? press->pos : "keep");
    return golden_expand(file, text, ratio, out, size);
}

/* Groups r25, r50 ... of a press file, as removed percent, ascending. */
static inline herr_t golden_add_ratio(hid_t file, const char *name, const H5L_info_t *info, void *context)
{
    int *ratio = context, percent;
    (void)file, (void)info;
    if (sscanf(name, "r%d", &percent) == 1 && ratio[0] < 15) ratio[++ratio[0]] = percent;
    return 0;
}
/* ratio[0]: their number. */
static inline void golden_ratios(hid_t file, int ratio[16])
{
    ratio[0] = 0;
    H5Literate(file, H5_INDEX_NAME, H5_ITER_INC, NULL, golden_add_ratio, ratio);
}

#endif
