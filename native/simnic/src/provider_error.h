/* Provider codes of error entries, as the EFA device reports them (efa_io_comp_status and the EFA
 * provider's own range), with the libfabric code and the text that go with each. */
#ifndef SIMNIC_PROVIDER_ERROR_H
#define SIMNIC_PROVIDER_ERROR_H

enum provider_error {
    PROVIDER_ERROR_NONE = 0,
    PROVIDER_ERROR_FLUSHED = 1,
    PROVIDER_ERROR_QUEUE_PAIR_INTERNAL = 2,
    PROVIDER_ERROR_UNSUPPORTED_OPERATION = 3,
    PROVIDER_ERROR_INVALID_ADDRESS_HANDLE = 4,
    PROVIDER_ERROR_INVALID_LOCAL_KEY = 5,
    PROVIDER_ERROR_BAD_LENGTH = 6,
    PROVIDER_ERROR_REMOTE_BAD_ADDRESS = 7,
    PROVIDER_ERROR_REMOTE_ABORT = 8,
    PROVIDER_ERROR_REMOTE_BAD_QUEUE_PAIR = 9,
    PROVIDER_ERROR_RECEIVER_NOT_READY = 10,
    PROVIDER_ERROR_RECEIVER_TOO_SHORT = 11,
    PROVIDER_ERROR_REMOTE_BAD_STATUS = 12,
    PROVIDER_ERROR_UNRESPONSIVE_REMOTE = 13,
    PROVIDER_ERROR_UNKNOWN_PEER = 14,
    PROVIDER_ERROR_UNREACHABLE_REMOTE = 15,
    PROVIDER_ERROR_OTHER = 4096,
};

/* The positive libfabric code (fi_errno.h) that the EFA provider reports with it. */
int provider_error_to_fabric(int provider_error);
const char *provider_error_text(int provider_error);

#endif
