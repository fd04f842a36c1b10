/* Text files carried by the program (kernels, method cards, presets, tuning entries); generated at build time. */
#ifndef KVL_EMBEDDED_H
#define KVL_EMBEDDED_H

struct kvl_embedded {
    const char *path, *text; /* path below the project's root: "cl/attend.cl" */
};
extern const struct kvl_embedded kvl_embedded[]; /* ends with path NULL */

/* The text of a path, NULL if there is none. */
const char *kvl_embedded_text(const char *path);

#endif
