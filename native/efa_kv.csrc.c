/* efa_kv.csrc.c - what the generated Python extension includes. */
#include "efa_kv.h"
