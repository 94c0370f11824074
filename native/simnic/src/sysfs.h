/* A directory that looks like /sys of the simulated instance, for software that reads there which
 * NIC is near which GPU. */
#ifndef SIMNIC_SYSFS_H
#define SIMNIC_SYSFS_H

#include "settings.h"

/* Writes what is not there yet. False, after a message to stderr, when it cannot. */
bool sysfs_write(const struct settings *settings);

#endif
