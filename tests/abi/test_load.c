/* --plugin: shared objects built here with the system's compiler, good ones and every kind of wrong one; options of a loaded
 * plug-in. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include "registry.h"
#include "spec.h"
#include "text.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[] = "/tmp/kvl-abi-XXXXXX";
static char path[64];

/* Each object has a path of its own: the loader knows objects by their path. */
static const char *built(const char *name, const char *defines)
{
    char command[1024];
    snprintf(path, sizeof path, "%s/%s.so", folder, name);
    snprintf(command, sizeof command, "cc -std=c11 -shared -fPIC -I'%s/compress' %s '%s/tests/abi/fixture.c' -o '%s'", KVL_ROOT,
             defines, KVL_ROOT, path);
    if (system(command) != 0) fail_msg("cannot build the fixture: %s", command);
    return path;
}

static void assert_refused(const char *name, const char *defines, kvl_status wanted, const char *text)
{
    const size_t n = kvl_registry_count();
    kvl_error_clear();
    const kvl_status status = kvl_registry_load(built(name, defines));
    if (status != wanted || strstr(kvl_error_text(), text) == NULL || strstr(kvl_error_text(), path) == NULL)
        fail_msg("%s: status %d, \"%s\"; wanted %d, \"%s\"", name, status, kvl_error_text(), wanted, text);
    assert_int_equal(kvl_registry_count(), n);
    kvl_error_clear();
}

static void refuses_other_abis(void **state)
{
    assert_refused("magic", "-DMAGIC=0x12345678", KVL_E_FORMAT, "magic is 0x12345678, kvlab's is 0x4c564b31");
    assert_refused("major", "-DMAJOR=2", KVL_E_UNSUPPORTED, "plug-in ABI 2.2, this kvlab has 1.2");
    assert_refused("kind", "-DKIND=77", KVL_E_UNSUPPORTED, "plug-in of kind 77, this kvlab has kinds 1 (codec), 2 (score), 3 (budget) and 4 (projection)");
    assert_refused("small", "-DSTRUCT_SIZE=100", KVL_E_FORMAT, "struct_size is 100 bytes, ABI 1.0 needs at least 168");
}

static void refuses_bad_objects(void **state)
{
    assert_refused("nosymbol", "-DNO_SYMBOL", KVL_E_FORMAT, "no symbol kvl_plugins");
    assert_refused("empty", "-DEMPTY", KVL_E_FORMAT, "kvl_plugins is empty");
    assert_refused("noname", "-DNAME=NULL", KVL_E_FORMAT, "without name or summary");
    assert_refused("noshape", "-DSHAPE=NULL", KVL_E_FORMAT, "lacks one of: roles, rope_stages, shape");
    assert_refused("learner", "-DLEARN=learn", KVL_E_FORMAT, "has learn(): it must be for keys after RoPE alone, with KVL_CODEC_NO_ROTATION");
    assert_refused("private", "-DPRIVATE_SIZE=12", KVL_E_FORMAT, "option ratio ends at byte 24 of a private struct of 12 bytes");
    assert_refused("taken", "-DNAME='\"int8\"'", KVL_E_USAGE, "there is a codec 'int8' already");
    assert_refused("twice", "-DTWICE -DNAME='\"double\"'", KVL_E_USAGE, "there is a codec 'double' already");
}

static void refuses_files_that_are_no_objects(void **state)
{
    kvl_error_clear();
    assert_int_equal(kvl_registry_load("/nowhere/x.so"), KVL_E_IO);
    assert_non_null(strstr(kvl_error_text(), "/nowhere/x.so: cannot load the plug-in"));
    kvl_error_clear();
    assert_int_equal(kvl_registry_load("libm.so.6"), KVL_E_IO); /* a name is a file here, never a library of the system */
    kvl_error_clear();
}

static void accepts_a_newer_minor(void **state)
{
    const size_t n = kvl_registry_count();
    kvl_error_clear();
    if (kvl_registry_load(built("grown", "-DGROWN -DMINOR=7 -DNAME='\"grown\"'")) != KVL_OK) fail_msg("%s", kvl_error_text());
    assert_int_equal(kvl_registry_count(), n + 1);
    const struct kvl_plugin_head *head = kvl_registry_find(KVL_KIND_CODEC, "grown");
    assert_ptr_equal(kvl_registry_at(n), head);
    assert_int_equal(head->abi_minor, 7);
    assert_int_equal(kvl_registry_check(head), KVL_OK);
    assert_null(kvl_registry_find(KVL_KIND_SCORE, "grown"));
}

static void assert_printed(const char *options, bool all, const char *wanted)
{
    struct kvl_instance instance;
    struct kvl_text text = {0};
    kvl_error_clear();
    if (kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "loaded"), options, &instance) != KVL_OK)
        fail_msg("%s", kvl_error_text());
    assert_int_equal(kvl_instance_print(&instance, all, &text), KVL_OK);
    assert_string_equal(text.data, wanted);
    kvl_text_free(&text);
    kvl_instance_free(&instance);
}

static void sets_and_prints_options(void **state)
{
    kvl_error_clear();
    if (kvl_registry_load(built("loaded", "-DNAME='\"loaded\"'")) != KVL_OK) fail_msg("%s", kvl_error_text());
    assert_printed(NULL, false, "loaded");
    assert_printed("", true, "loaded(whole=3,fast,ratio=0.1,fail=0)");
    assert_printed("slow,ratio=0.3333333333333333,whole=-5", false, "loaded(whole=-5,slow,ratio=0.3333333333333333)");
    assert_printed("ratio=1e-3", false, "loaded(ratio=0.001)");
    struct kvl_instance instance;
    assert_int_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "loaded"), "ratio=1.5", &instance), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(),
                        "loaded: ratio=1.5 is out of range at character 7 of \"ratio=1.5\": legal is a number from 0 to 1");
    kvl_error_clear();
    assert_int_equal(kvl_instance_new(kvl_registry_find(KVL_KIND_CODEC, "loaded"), "ratio=nan", &instance), KVL_E_USAGE);
    kvl_error_clear();
}

/* init once, fini exactly once, also when init fails; neither when the options are wrong. */
static void calls_fini_once(void **state)
{
    const struct kvl_plugin_head *head = kvl_registry_find(KVL_KIND_CODEC, "loaded");
    char loaded[96];
    snprintf(loaded, sizeof loaded, "%s/loaded.so", folder);
    void *object = dlopen(loaded, RTLD_NOW | RTLD_NOLOAD);
    assert_non_null(object);
    const int *init_calls = dlsym(object, "init_calls"), *fini_calls = dlsym(object, "fini_calls");
    const int before = *init_calls;
    struct kvl_instance instance;
    assert_int_equal(*fini_calls, before);
    assert_int_equal(kvl_instance_new(head, NULL, &instance), KVL_OK);
    assert_int_equal(*fini_calls, before);
    kvl_instance_free(&instance);
    assert_int_equal(*fini_calls, before + 1);
    assert_int_equal(kvl_instance_new(head, "fail=1", &instance), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "fail=1 was asked for");
    kvl_error_clear();
    assert_int_equal(kvl_instance_new(head, "fail=2", &instance), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(), "loaded: the plug-in refused its options without a reason");
    kvl_error_clear();
    assert_int_equal(kvl_instance_new(head, "fail=3", &instance), KVL_E_USAGE);
    kvl_error_clear();
    kvl_instance_free(&instance);
    assert_int_equal(*init_calls, before + 3);
    assert_int_equal(*fini_calls, before + 3);
    dlclose(object);
}

static void specs_know_loaded_codecs(void **state)
{
    struct kvl_spec *spec = NULL;
    kvl_error_clear();
    assert_int_equal(kvl_spec_parse("v=loaded(slow)", &spec), KVL_OK);
    kvl_spec_free(&spec);
    assert_int_equal(kvl_spec_parse("loaded", &spec), KVL_E_USAGE);
    assert_string_equal(kvl_error_text(),
                        "--kv: codec loaded does not store keys at character 1 of \"loaded\": choose another codec for this side");
    kvl_error_clear();
}

static int make_folder(void **state) { return mkdtemp(folder) == NULL; }

static int remove_folder(void **state)
{
    char command[64];
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_other_abis),
        cmocka_unit_test(refuses_bad_objects),
        cmocka_unit_test(refuses_files_that_are_no_objects),
        cmocka_unit_test(accepts_a_newer_minor),
        cmocka_unit_test(sets_and_prints_options),
        cmocka_unit_test(calls_fini_once),
        cmocka_unit_test(specs_know_loaded_codecs),
    };
    if (system("cc --version >/dev/null 2>&1") != 0) {
        puts("skipped: no C compiler `cc` to build plug-ins with");
        return 77;
    }
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
