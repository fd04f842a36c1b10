/* Cuts text into the words that byte-pair merges must not cross, by the patterns that belong to a pre-tokenizer's name. */
#ifndef KVL_PRETOKENIZER_H
#define KVL_PRETOKENIZER_H
#include "gguf.h"
#include "status.h"

struct kvl_pretokenizer;

/* name: the value of tokenizer.ggml.pre. An unknown one: KVL_E_UNSUPPORTED, listing the known. */
kvl_status kvl_pretokenizer_new(struct kvl_gguf_str name, struct kvl_pretokenizer **out);
void kvl_pretokenizer_free(struct kvl_pretokenizer **p);

const char *kvl_pretokenizer_name(const struct kvl_pretokenizer *p);
bool kvl_pretokenizer_whole_words(const struct kvl_pretokenizer *p); /* a word that is a token is taken without merging */
bool kvl_pretokenizer_adds_bos(const struct kvl_pretokenizer *p);    /* unless the model's metadata say otherwise */

/* Offsets behind each word, ascending, the last one = size; any bytes are legal. Free *ends with kvl_free. */
kvl_status kvl_pretokenizer_split(const struct kvl_pretokenizer *p, const char *text, size_t size, size_t **ends, size_t *n);

#endif
