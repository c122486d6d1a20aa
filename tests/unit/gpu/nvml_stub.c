/* A libnvidia-ml.so.1 with made-up GPUs, one unless told otherwise, so that the real ctypes path runs where there is none.
 *
 * STUB_INIT=N    nvmlInit returns N
 * STUB_LOST=F    while the file F exists, every call on the device returns GPU_IS_LOST
 * STUB_MIG=1     MIG is on: no utilisation, no samples
 * STUB_COUNT=N   so many GPUs: GPU-stub, GPU-stub-1, …
 * STUB_BROKEN=N  GPU N gives no handle: GPU_IS_LOST
 * STUB_QUIET=1   there is never a new sample
 * STUB_UNAVAILABLE=1  every call on the device returns UNKNOWN
 * What is not defined here is FunctionNotFound; compile with -DNO_ENERGY to lose the energy counter as well. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, LOST = 15, UNKNOWN = 999 };
typedef unsigned long long u64;
typedef struct { u64 timeStamp; union { unsigned ui; u64 ull; double d; } value; } Sample;
typedef struct { unsigned pid; u64 usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } Process;

static int devices[16];
static u64 us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}
static int state(void) {
    const char *lost = getenv("STUB_LOST");
    if (lost && access(lost, F_OK) == 0) return LOST;
    return getenv("STUB_UNAVAILABLE") ? UNKNOWN : OK;
}
static int mig(void) { return getenv("STUB_MIG") != NULL; }

int nvmlInitWithFlags(unsigned flags) {
    const char *code = getenv("STUB_INIT");
    return code ? atoi(code) : state() == LOST ? LOST : OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.65", n); return OK; }
int nvmlSystemGetNVMLVersion(char *text, unsigned n) { strncpy(text, "13.580.65", n); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { 
    const char *gpus = getenv("STUB_COUNT");
    *count = getenv("STUB_EMPTY") ? 0 : gpus ? atoi(gpus) : 1;
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    const char *broken = getenv("STUB_BROKEN");
    *handle = &devices[index];
    return broken && atoi(broken) == index ? LOST : OK;
}
int nvmlDeviceGetUUID(void *h, char *text, unsigned n) {
    int index = (int *)h - devices;
    if (mig() && index >= 8) snprintf(text, n, "MIG-stub-%d", index - 8);
    else snprintf(text, n, index ? "GPU-stub-%d" : "GPU-stub", index);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {  /* of instances: MIG-stub-N is one of GPU N */
    if (!mig() || strncmp(uuid, "MIG-stub-", 9)) return NOT_FOUND;
    *handle = &devices[8 + atoi(uuid + 9)];
    return OK;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *instance, void **handle) {
    *handle = (int *)instance - 8;
    return OK;
}
int nvmlDeviceGetName(void *h, char *text, unsigned n) { strncpy(text, "stub GPU", n); return OK; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *next) { *now = *next = mig(); return OK; }
int nvmlDeviceGetUtilizationRates(void *h, unsigned *rates) {
    if (state()) return state();
    if (mig()) return NOT_SUPPORTED;
    rates[0] = 40; rates[1] = 10;
    return OK;
}
int nvmlDeviceGetPowerUsage(void *h, unsigned *mw) { *mw = 80000; return state(); }
#ifndef NO_ENERGY
int nvmlDeviceGetTotalEnergyConsumption(void *h, u64 *mj) { *mj = us(CLOCK_MONOTONIC) * 80 / 1000; return state(); }
#endif
int nvmlDeviceGetSamples(void *h, int kind, u64 since, unsigned *type, unsigned *count, Sample *samples) {
    u64 newest = us(CLOCK_REALTIME) / 200000 * 200000;
    if (state()) return state();
    if (mig()) return NOT_SUPPORTED;
    if (getenv("STUB_QUIET") || newest <= since) return NOT_FOUND;
    *type = 1;
    if (!samples) { *count = 71; return OK; }
    unsigned n = 0;
    for (int i = 70; i >= 0; i--)
        if (newest - i * 200000ull > since && n < *count)
            samples[n++] = (Sample){newest - i * 200000ull, {.ui = 40}};
    *count = n;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, Process *list) {
    if (state()) return state();
    if (!list) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    list[0] = (Process){getpid(), 1 << 20, ~0u, ~0u};
    return OK;
}
