#include "provider_error.h"

#include <rdma/fi_errno.h>
#include <stddef.h>

static const struct {
    int code;
    int fabric_code;
    const char *text;
} ERRORS[] = {
    {PROVIDER_ERROR_NONE, 0, "Success"},
    {PROVIDER_ERROR_FLUSHED, FI_ECANCELED, "Flushed during queue pair destroy"},
    {PROVIDER_ERROR_QUEUE_PAIR_INTERNAL, FI_EINVAL, "Internal queue pair error (local)"},
    {PROVIDER_ERROR_UNSUPPORTED_OPERATION, FI_EINVAL, "Unsupported operation type"},
    {PROVIDER_ERROR_INVALID_ADDRESS_HANDLE, FI_EINVAL, "Invalid address handle (local)"},
    {PROVIDER_ERROR_INVALID_LOCAL_KEY, FI_EINVAL,
     "Local key (LKEY) invalid or does not match IOVA"},
    {PROVIDER_ERROR_BAD_LENGTH, FI_EMSGSIZE, "Message too long"},
    {PROVIDER_ERROR_REMOTE_BAD_ADDRESS, FI_EINVAL,
     "Remote key (RKEY) not registered or does not match remote IOVA"},
    {PROVIDER_ERROR_REMOTE_ABORT, FI_ECONNABORTED, "Connection was reset by remote peer"},
    {PROVIDER_ERROR_REMOTE_BAD_QUEUE_PAIR, FI_ENOTCONN,
     "Bad queue pair (QP) number (QP does not exist or is in error state)"},
    {PROVIDER_ERROR_RECEIVER_NOT_READY, FI_ENORX,
     "Destination resource not ready (no work queue entries posted on receive queue)"},
    {PROVIDER_ERROR_RECEIVER_TOO_SHORT, FI_ETRUNC, "Remote scatter-gather list too short"},
    {PROVIDER_ERROR_REMOTE_BAD_STATUS, FI_EREMOTEIO, "Unexpected status returned by responder"},
    {PROVIDER_ERROR_UNRESPONSIVE_REMOTE, FI_ECONNABORTED,
     "Unresponsive remote (was previously responsive)"},
    {PROVIDER_ERROR_UNKNOWN_PEER, FI_ENOTCONN,
     "No valid address handle at remote side (required for RDMA operations)"},
    {PROVIDER_ERROR_UNREACHABLE_REMOTE, FI_EHOSTUNREACH,
     "Unreachable remote (never received a response)"},
};

enum { ERROR_TOTAL = sizeof ERRORS / sizeof ERRORS[0] };

int provider_error_to_fabric(int provider_error)
{
    for (int i = 0; i < ERROR_TOTAL; i++)
        if (ERRORS[i].code == provider_error)
            return ERRORS[i].fabric_code;
    return FI_EOTHER;
}

const char *provider_error_text(int provider_error)
{
    for (int i = 0; i < ERROR_TOTAL; i++)
        if (ERRORS[i].code == provider_error)
            return ERRORS[i].text;
    return "Unknown error";
}
