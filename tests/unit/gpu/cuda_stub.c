/* A libcuda.so.1 with four made-up GPUs that tell their UUIDs and nothing else.
 *
 * CUDA_VISIBLE_DEVICES=2,0  only these, in this order, as the real driver has it (indices only)
 * STUB_CUDA_INIT=N          cuInit returns N
 * STUB_CUDA_MIG=1           MIG is on: every ordinal is an instance with a UUID of its own
 * Compile with -DOLD to lose cuDeviceGetUuid_v2, as before CUDA 11.4, with -DNEW to lose the first version. */
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, GPUS = 4 };

static int order[GPUS], count = -1;

int cuInit(unsigned flags) {
    const char *code = getenv("STUB_CUDA_INIT"), *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (code) return atoi(code);
    count = 0;
    if (!visible) for (; count < GPUS; count++) order[count] = count;
    else for (const char *at = visible; *at; at += strcspn(at, ","), at += *at == ',')
        if (count < GPUS) order[count++] = atoi(at);
    return OK;
}
int cuDeviceGetCount(int *found) { *found = count; return count < 0 ? NOT_INITIALIZED : OK; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= count) return count < 0 ? NOT_INITIALIZED : INVALID_DEVICE;
    *device = order[ordinal];
    return OK;
}
static int tell(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = 16 * i + 15;
    uuid[15] = device;
    return OK;
}
#ifndef NEW
int cuDeviceGetUuid(unsigned char *uuid, int device) { return tell(uuid, device); }
#endif
#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    tell(uuid, device);
    if (getenv("STUB_CUDA_MIG")) uuid[0] = 0x77;
    return OK;
}
#endif
int cuGetErrorName(int code, const char **text) { *text = "CUDA_ERROR_STUB"; return OK; }
int cuGetErrorString(int code, const char **text) { *text = "a stub's error"; return OK; }
