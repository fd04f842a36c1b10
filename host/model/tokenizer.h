/* Tokenizers of GGUF files: byte-level BPE ("gpt2") with the pre-tokenizer patterns smollm, gpt-2, llama-bpe, qwen2, default (PCRE2), and
 * SentencePiece's merges ("llama": llama 2, mistral, gemma). */
#ifndef KVL_TOKENIZER_H
#define KVL_TOKENIZER_H
#include "gguf.h"
#include "status.h"
#include "text.h"

struct kvl_tokenizer;

/* Copies what it needs: gguf may be closed afterwards. Unknown tokenizer model or pre-tokenizer: KVL_E_UNSUPPORTED, listing the known. */
kvl_status kvl_tokenizer_new(const struct kvl_gguf *gguf, struct kvl_tokenizer **out);
void kvl_tokenizer_free(struct kvl_tokenizer **tokenizer);

uint32_t kvl_tokenizer_n_vocab(const struct kvl_tokenizer *t);
int32_t kvl_tokenizer_bos(const struct kvl_tokenizer *t);      /* -1 if none */
bool kvl_tokenizer_is_end(const struct kvl_tokenizer *t, int32_t id); /* eos, eot, end of turn */
bool kvl_tokenizer_adds_bos(const struct kvl_tokenizer *t);    /* what the model's metadata say */

/* text: any bytes (invalid UTF-8 included; decode(encode(x)) = x, but for the spaces that some vocabularies put in front of plain text). A byte that the vocabulary has no token for: KVL_E_UNSUPPORTED,
 * naming it. special: control tokens written in the text ("<|im_end|>") become their ids. No BOS is added.
 * *ids grows with kvl_realloc semantics: pass NULL-initialised; free with kvl_free. */
kvl_status kvl_tokenizer_encode(const struct kvl_tokenizer *t, const char *text, size_t size, bool special, int32_t **ids, size_t *n);

/* The same with the model's BOS in front if it wants one. */
kvl_status kvl_tokenizer_encode_stream(const struct kvl_tokenizer *t, const char *text, size_t size, bool special, int32_t **ids, size_t *n);

/* Appends the bytes of one token. special: control tokens print their text, else nothing. */
kvl_status kvl_tokenizer_decode(const struct kvl_tokenizer *t, int32_t id, bool special, struct kvl_text *out);

/* sha256 over the vocabulary, merges or scores, and the name of the patterns or of the model. */
const char *kvl_tokenizer_sha256(const struct kvl_tokenizer *t);

/* The model's chat template (Jinja), NULL if it has none. */
const char *kvl_tokenizer_chat_template(const struct kvl_tokenizer *t);

/* ---- chat ---- */
struct kvl_chat_message {
    const char *role, *content; /* "system" | "user" | "assistant" */
};
/* The prompt text for the messages with the model's template, open for the assistant's turn. Recognized by their marks: ChatML.
 * An unknown template: KVL_E_UNSUPPORTED naming the known ones. Encode with special = true. */
kvl_status kvl_chat_format(const struct kvl_tokenizer *t, const struct kvl_chat_message *messages, size_t n, struct kvl_text *out);

#endif
