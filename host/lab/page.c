#include "page.h"
#include "embedded.h"
#include "file.h"
#include "log.h"
#include "text.h"
#include <string.h>

/* JSON inside a script element: "</" would end it, "<!--" change how it is read. */
static kvl_status append_json(struct kvl_text *out, const char *json)
{
    kvl_status status = KVL_OK;
    for (const char *c = json; *c;) {
        const size_t plain = strcspn(c, "<");
        KVL_TRY(kvl_text_append(out, c, plain));
        c += plain;
        if (*c == '\0') break;
        KVL_TRY(kvl_text_append(out, "\\u003c", 6));
        c++;
    }
done:
    return status;
}

/* What stands before the mark; *rest goes on behind it. */
static kvl_status append_before(struct kvl_text *out, const char **rest, const char *mark)
{
    const char *at = strstr(*rest, mark);
    const kvl_status status = kvl_text_append(out, *rest, (size_t)(at - *rest));
    *rest = at + strlen(mark);
    return status;
}

kvl_status kvl_page_write(const char *path, const char *html, const cJSON *data, const struct kvl_page_part *parts, size_t n_parts)
{
    kvl_status status = KVL_OK;
    struct kvl_text page = {0};
    const char *rest = kvl_embedded_text(html);
    char *json = cJSON_PrintUnformatted(data);
    if (json == NULL) {
        status = kvl_fail(KVL_E_MEMORY, "no memory for the page %s", path);
        goto done;
    }
    KVL_TRY(append_before(&page, &rest, "@DATA@"));
    KVL_TRY(append_json(&page, json));
    for (size_t i = 0; i < n_parts; i++) {
        const char *text = kvl_embedded_text(parts[i].file);
        KVL_TRY(append_before(&page, &rest, parts[i].mark));
        KVL_TRY(kvl_text_append(&page, text, strlen(text)));
    }
    KVL_TRY(kvl_text_append(&page, rest, strlen(rest)));
    KVL_TRY(kvl_file_write(path, page.data, page.size));
done:
    cJSON_free(json);
    kvl_text_free(&page);
    return status;
}
