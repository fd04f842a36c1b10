/* Chat prompts without a template engine: a model's Jinja template is recognized by the marks it writes.
 *
 * ChatML: each message is "<|im_start|>ROLE\nCONTENT<|im_end|>\n". Templates that put a system message before a conversation
 * without one carry it as a string literal, from where it is taken. */
#include "tokenizer.h"
#include <string.h>

#define TURN_START "<|im_start|>"
#define TURN_END "<|im_end|>"

/* One character of a Jinja string literal, past escapes; returns how many characters of the literal it took. */
static size_t literal_char(const char *literal, char *c)
{
    static const char escapes[] = "n\nt\tr\r";
    *c = literal[0];
    if (literal[0] != '\\' || literal[1] == '\0') return 1;
    *c = literal[1];
    for (const char *e = escapes; *e != '\0'; e += 2) {
        if (literal[1] == e[0]) *c = e[1];
    }
    return 2;
}

/* The text of the literal from `literal` to TURN_END, into out; found: it gets there before its closing quote. */
static kvl_status read_default(const char *literal, char quote, struct kvl_text *out, bool *found)
{
    kvl_status status = KVL_OK;
    *found = false;
    out->size = 0;
    while (*literal != '\0' && *literal != quote) {
        char c;
        if (strncmp(literal, TURN_END, strlen(TURN_END)) == 0) {
            *found = out->size > 1 && out->data[0] == '\n';
            break;
        }
        literal += literal_char(literal, &c);
        KVL_TRY(kvl_text_append(out, &c, 1));
    }
done:
    return status;
}

/* The system message that the template writes when a conversation has none, as "\nCONTENT"; empty if it writes none. */
static kvl_status find_default_system(const char *template, struct kvl_text *out)
{
    static const char mark[] = TURN_START "system";
    kvl_status status = KVL_OK;
    bool found = false;
    for (const char *at = template; !found && (at = strstr(at, mark)) != NULL; at += strlen(mark)) {
        const char quote = at > template ? at[-1] : '\0';
        if (quote == '\'' || quote == '"') KVL_TRY(read_default(at + strlen(mark), quote, out, &found));
    }
    if (!found) out->size = 0;
done:
    return status;
}

static kvl_status write_chatml(const char *template, const struct kvl_chat_message *messages, size_t n, struct kvl_text *out)
{
    kvl_status status = KVL_OK;
    struct kvl_text system = {0};
    if (n > 0 && strcmp(messages[0].role, "system") != 0) {
        KVL_TRY(find_default_system(template, &system));
        if (system.size > 0) KVL_TRY(kvl_text_printf(out, TURN_START "system%.*s" TURN_END "\n", (int)system.size, system.data));
    }
    for (size_t i = 0; i < n; i++)
        KVL_TRY(kvl_text_printf(out, TURN_START "%s\n%s" TURN_END "\n", messages[i].role, messages[i].content));
    KVL_TRY(kvl_text_printf(out, TURN_START "assistant\n"));
done:
    kvl_text_free(&system);
    return status;
}

kvl_status kvl_chat_format(const struct kvl_tokenizer *t, const struct kvl_chat_message *messages, size_t n, struct kvl_text *out)
{
    const char *template = kvl_tokenizer_chat_template(t);
    if (template == NULL) return kvl_fail(KVL_E_UNSUPPORTED, "the model has no chat template; give the prompt as plain text");
    if (strstr(template, TURN_START) == NULL)
        return kvl_fail(KVL_E_UNSUPPORTED,
                        "the model's chat template is not known; known: ChatML (" TURN_START "); give the prompt as plain text");
    return write_chatml(template, messages, n, out);
}
