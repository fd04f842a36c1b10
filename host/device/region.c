/* Memory of CPU devices in large pages. Drivers take what malloc gives them, in pages of 4 KiB unless the system was told to make all pages large;
 * reading weights and caches once then goes at the pace of address translation: 40 GB/s instead of 60 on two cores of an AMD EPYC in a virtual
 * machine. So buffers there lie in regions of ours, one behind the other, for which large pages are asked for. Where the system has none to give,
 * nothing is lost. A region goes when its last buffer has gone. */
#include "device_internal.h"
#include "mem.h"
#include <sys/mman.h>

enum { LARGE_PAGE = 2 << 20, LEAST_REGION = 16 * LARGE_PAGE, BUFFER_ALIGNMENT = 4096 };

struct kvl_region {
    struct kvl_device *device;
    struct kvl_region *next;
    char *base;
    uint64_t size, used, n_buffers;
};

static uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

/* Address space that begins with a large page; NULL if there is none. */
static char *map(uint64_t size)
{
    char *all = mmap(NULL, size + LARGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return NULL;
    const uint64_t before = round_up((uintptr_t)all, LARGE_PAGE) - (uintptr_t)all;
    if (before > 0) munmap(all, before);
    munmap(all + before + size, LARGE_PAGE - before);
    madvise(all + before, size, MADV_HUGEPAGE);
    return all + before;
}

static struct kvl_region *region_new(struct kvl_device *device, uint64_t bytes)
{
    struct kvl_region *region = NULL;
    if (kvl_alloc(&region, 1, sizeof *region) != KVL_OK) return NULL;
    region->size = round_up(bytes > LEAST_REGION ? bytes : LEAST_REGION, LARGE_PAGE);
    region->base = map(region->size);
    if (region->base == NULL) {
        kvl_free(&region);
        return NULL;
    }
    region->device = device;
    region->next = device->regions;
    device->regions = region;
    return region;
}

void *kvl_region_take(struct kvl_device *device, uint64_t bytes, struct kvl_region **out)
{
    struct kvl_region *region = NULL;
    *out = NULL;
    if (device->caps.type != KVL_DEVICE_CPU || !device->caps.unified_memory) return NULL;
    bytes = round_up(bytes, BUFFER_ALIGNMENT);
    for (region = device->regions; region != NULL && region->size - region->used < bytes;) region = region->next;
    if (region == NULL) region = region_new(device, bytes);
    if (region == NULL) return NULL;
    char *taken = region->base + region->used;
    region->used += bytes;
    region->n_buffers++;
    *out = region;
    return taken;
}

void kvl_region_finish(const struct kvl_region *region) { clFinish(region->device->queue); }

void kvl_region_give_back(struct kvl_region *region)
{
    struct kvl_region **link = &region->device->regions;
    if (--region->n_buffers > 0) return;
    while (*link != region) link = &(*link)->next;
    *link = region->next;
    munmap(region->base, region->size);
    kvl_free(&region);
}
