/* What fi_getinfo offers and refuses, and how objects open and close. */
#include "harness.h"

#include <string.h>
#include <sys/stat.h>

static struct fi_info *new_hints(void)
{
    struct fi_info *hints = fi_allocinfo();
    CHECK(hints);
    hints->fabric_attr->prov_name = strdup("efa");
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    return hints;
}

static int count_offers(struct fi_info *hints)
{
    struct fi_info *list = NULL;
    int count = 0, result = fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, hints, &list);
    CHECK(result == 0 || result == -FI_ENODATA);
    for (struct fi_info *info = list; info; info = info->next)
        count++;
    if (list)
        fi_freeinfo(list);
    fi_freeinfo(hints);
    return count;
}

/* Environment: p5.48xlarge */
static void lists_an_instance(void)
{
    static const char *const first_names[] = {"rdmap79s0-rdm", "rdmap80s0-rdm", "rdmap81s0-rdm",
                                              "rdmap82s0-rdm", "rdmap96s0-rdm"};
    struct fi_info *list = request_info(&(struct rail_options){.nic = 0});
    int count = 0;
    for (struct fi_info *info = list; info; info = info->next, count++) {
        if (count < 5)
            CHECK_EQUAL(strcmp(info->domain_attr->name, first_names[count]), 0);
        CHECK_EQUAL(strcmp(info->fabric_attr->name, "efa"), 0);
        CHECK_EQUAL(strcmp(info->fabric_attr->prov_name, "efa"), 0);
        CHECK_EQUAL(info->fabric_attr->prov_version, FI_VERSION(999, 0));
        CHECK_EQUAL(info->domain_attr->mr_mode,
                    FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY);
        CHECK_EQUAL(info->domain_attr->mr_key_size, 4);
        CHECK_EQUAL(info->domain_attr->cq_data_size, 4);
        CHECK_EQUAL(info->ep_attr->type, FI_EP_RDM);
        CHECK_EQUAL(info->addr_format, FI_ADDR_EFA);
        CHECK_EQUAL(info->src_addrlen, 32);
        CHECK_EQUAL(info->tx_attr->inject_size, 32);
        CHECK_EQUAL(info->tx_attr->iov_limit, 1);
        CHECK_EQUAL(info->tx_attr->rma_iov_limit, 1);
        CHECK_EQUAL(info->tx_attr->size, 4096);
        CHECK_EQUAL(info->tx_attr->msg_order, 0);
        CHECK(info->nic);
        CHECK_EQUAL(strncmp(info->domain_attr->name, info->nic->device_attr->name,
                            strlen(info->nic->device_attr->name)),
                    0);
        CHECK_EQUAL(info->nic->bus_attr->bus_type, FI_BUS_PCI);
        CHECK_EQUAL(info->nic->bus_attr->attr.pci.bus_id, 0x4f + 0x11 * (count / 4) + count % 4);
        CHECK_EQUAL(info->nic->link_attr->speed, 100000000000ll);
        CHECK_EQUAL(info->nic->link_attr->state, FI_LINK_UP);
    }
    CHECK_EQUAL(count, 32);
    fi_freeinfo(list);
}

static void set_order(struct fi_info *hints)
{
    hints->tx_attr->msg_order = FI_ORDER_WAW;
}
static void set_tagged(struct fi_info *hints)
{
    hints->caps = FI_TAGGED;
}
static void set_message_endpoint(struct fi_info *hints)
{
    hints->ep_attr->type = FI_EP_MSG;
}
static void set_no_local(struct fi_info *hints)
{
    hints->domain_attr->mr_mode &= ~FI_MR_LOCAL;
}
static void set_no_virtual(struct fi_info *hints)
{
    hints->domain_attr->mr_mode &= ~FI_MR_VIRT_ADDR;
}
static void set_inject(struct fi_info *hints)
{
    hints->tx_attr->inject_size = 33;
}
static void set_segments(struct fi_info *hints)
{
    hints->tx_attr->iov_limit = 2;
}
static void set_queue(struct fi_info *hints)
{
    hints->tx_attr->size = 4097;
}
static void set_data(struct fi_info *hints)
{
    hints->domain_attr->cq_data_size = 8;
}
static void set_device_memory(struct fi_info *hints)
{
    hints->caps = FI_RMA | FI_HMEM;
}
static void set_domain(struct fi_info *hints)
{
    hints->domain_attr->name = strdup("rdmap1s0-rdm");
}
static void set_fabric(struct fi_info *hints)
{
    hints->fabric_attr->name = strdup("ethernet");
}
static void set_endpoint_threads(struct fi_info *hints)
{
    hints->domain_attr->threading = FI_THREAD_ENDPOINT;
}

/* Environment: 4 NICs */
static void refuses_what_efa_lacks(void)
{
    static void (*const changes[])(struct fi_info *) = {
        set_order,
        set_tagged,
        set_message_endpoint,
        set_no_local,
        set_no_virtual,
        set_inject,
        set_segments,
        set_queue,
        set_data,
        set_device_memory,
        set_domain,
        set_fabric,
        set_endpoint_threads,
    };
    CHECK_EQUAL(count_offers(new_hints()), 4);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        struct fi_info *hints = new_hints();
        changes[i](hints);
        fprintf(stderr, "change %zu\n", i);
        CHECK_EQUAL(count_offers(hints), 0);
    }
    struct fi_info *one = new_hints();
    one->domain_attr->name = strdup("rdmap32s27-rdm");
    CHECK_EQUAL(count_offers(one), 1);
}

/* Environment: both fabrics, direct first */
static void offers_the_direct_fabric(void)
{
    struct fi_info *with_context = new_hints(), *without = new_hints(), *list;
    with_context->mode = FI_CONTEXT2;
    CHECK_EQUAL(fi_getinfo(FI_VERSION(1, 17), NULL, NULL, 0, with_context, &list), 0);
    CHECK_EQUAL(strcmp(list->fabric_attr->name, "efa-direct"), 0);
    CHECK_EQUAL(list->mode, FI_CONTEXT2);
    fi_freeinfo(list);
    CHECK_EQUAL(count_offers(with_context), 8);
    CHECK_EQUAL(count_offers(without), 4);
}

static void opens_no_wait_object(void)
{
    struct rail rail;
    struct fid_cq *queue;
    rail_open(&rail, (struct rail_options){.nic = 0});
    enum fi_wait_obj kinds[] = {FI_WAIT_UNSPEC, FI_WAIT_FD, FI_WAIT_YIELD};
    for (int i = 0; i < 3; i++) {
        struct fi_cq_attr attributes = {.format = FI_CQ_FORMAT_DATA, .wait_obj = kinds[i]};
        CHECK_EQUAL(fi_cq_open(rail.domain, &attributes, &queue, NULL), -FI_ENOSYS);
    }
    struct fi_cq_data_entry entry;
    CHECK_EQUAL(fi_cq_sread(rail.completions, &entry, 1, NULL, 0), -FI_ENOSYS);
    rail_close(&rail);
}

static void closes_in_order(void)
{
    struct rail rail;
    rail_open(&rail, (struct rail_options){.nic = 0});
    CHECK_EQUAL(fi_close(&rail.domain->fid), -FI_EBUSY);
    CHECK_EQUAL(fi_close(&rail.completions->fid), -FI_EBUSY);
    CHECK_EQUAL(fi_close(&rail.addresses->fid), -FI_EBUSY);
    rail_close(&rail);
}

static bool is_there(const char *root, const char *name)
{
    char path[512];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", root, name);
    return stat(path, &status) == 0;
}

/* Environment: p5.48xlarge, EFA_KV_SIM_SYSFS is a new directory */
static void writes_a_device_tree(void)
{
    const char *root = getenv("EFA_KV_SIM_SYSFS");
    char path[512], text[16] = "";
    struct fi_info *list = request_info(&(struct rail_options){.nic = 0});
    fi_freeinfo(list);
    CHECK(is_there(root, "class/infiniband/rdmap79s0/device/numa_node"));
    CHECK(is_there(root, "bus/pci/devices/0000:4f:00.0/infiniband/rdmap79s0"));
    CHECK(is_there(root, "bus/pci/devices/0000:53:00.0/class")); /* the first GPU of a p5 */
    CHECK(is_there(
        root, "devices/pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.0/0000:4f:00.0/vendor"));
    snprintf(path, sizeof path, "%s/bus/pci/devices/0000:c9:00.0/numa_node", root);
    FILE *file = fopen(path, "r");
    CHECK(file && fgets(text, sizeof text, file));
    fclose(file);
    CHECK_EQUAL(atoi(text), 1);
}

/* Environment: a fault that cannot be read */
static void refuses_bad_settings(void)
{
    CHECK_EQUAL(count_offers(new_hints()), 0);
}

int main(int count, char **arguments)
{
    static const struct test_case cases[] = {
        {"lists_an_instance", lists_an_instance},
        {"refuses_what_efa_lacks", refuses_what_efa_lacks},
        {"offers_the_direct_fabric", offers_the_direct_fabric},
        {"opens_no_wait_object", opens_no_wait_object},
        {"closes_in_order", closes_in_order},
        {"writes_a_device_tree", writes_a_device_tree},
        {"refuses_bad_settings", refuses_bad_settings},
    };
    return run_case(cases, sizeof cases / sizeof cases[0], count, arguments);
}
