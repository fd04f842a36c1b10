/* Logits of the base cache, kept in a folder from one run to the next: a grid of strategies on one text needs those of a window once.
 *
 * A file holds the scored rows of one sequence: 64 hex digits, the sha256 of what follows, then float32 [n_rows][n_vocab] as this machine stores them.
 * Its name is the sha256 of all they depend on. A file that is damaged counts as missing and is written again. */
#ifndef KVL_BASE_LOGITS_H
#define KVL_BASE_LOGITS_H
#include "status.h"
#include <stdbool.h>
#include <stdint.h>

struct kvl_base_logits;

/* Makes the folder. depends_on: everything but the tokens that the rows depend on, as text; the digest of this program is added. */
kvl_status kvl_base_logits_open(const char *folder, const char *depends_on, uint32_t n_rows, uint32_t n_vocab, struct kvl_base_logits **out);
void kvl_base_logits_close(struct kvl_base_logits **kept);

/* Turns to a sequence of n tokens and reads its rows, if they are there. */
kvl_status kvl_base_logits_begin(struct kvl_base_logits *kept, const int32_t *tokens, uint32_t n);
bool kvl_base_logits_known(const struct kvl_base_logits *kept);
/* Its rows from the at-th on: to be read if known, else to be filled. Borrowed. */
float *kvl_base_logits_rows(struct kvl_base_logits *kept, uint32_t at);
/* Writes the rows of a sequence that was not known. */
kvl_status kvl_base_logits_end(struct kvl_base_logits *kept);

#endif
