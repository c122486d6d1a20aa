/* A libcuda.so.1 without a GPU: the calls that sharing device memory takes.

   "Device memory" is a POSIX shared-memory object that its handle names. A device address is one that nobody can
   dereference (a reservation without access rights); copies go through the object's descriptor. What the real driver
   refuses is refused: calls without a current context, addresses that are not mapped, sizes past an allocation.

   STUB_CUDA_INIT=N       cuInit returns N
   STUB_CUDA_DEVICES=N    so many devices; 1 without it
   STUB_CUDA_PEERS=1      they reach each other's memory
   STUB_CUDA_FOLDER=PATH  one line in PATH/log for each handle opened or closed; while PATH/hold-read exists a copy to
                          the host waits, after making PATH/held; likewise hold-write; while PATH/lost exists every
                          copy fails */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <pthread.h>

enum { OK = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       PEER_ACCESS = 217, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700 };

typedef struct { char reserved[64]; } Handle;
typedef struct { char magic[4]; int device; uint64_t size; char name[48]; } Exported;
typedef struct { uint64_t address, size; int fd, opened; Exported exported; } Mapped;

static Mapped mapped[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static __thread int depth, stack[16];

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static char *in_folder(const char *name, char *path) {
    const char *folder = getenv("STUB_CUDA_FOLDER");
    if (!folder) return NULL;
    snprintf(path, 512, "%s/%s", folder, name);
    return path;
}

static int there(const char *name) {
    char path[512];
    return in_folder(name, path) && access(path, F_OK) == 0;
}

static void note(const char *what, const char *name) {
    char path[512];
    FILE *file = in_folder("log", path) ? fopen(path, "a") : NULL;
    if (file) { fprintf(file, "%s %s\n", what, name); fclose(file); }
}

static Mapped *find(uint64_t address) {
    for (int i = 0; i < 4096; i++)
        if (mapped[i].size && mapped[i].address <= address && address < mapped[i].address + mapped[i].size)
            return &mapped[i];
    return NULL;
}

static int map(int fd, const Exported *exported, int opened, uint64_t *address) {
    for (int i = 0; i < 4096; i++)
        if (!mapped[i].size) {
            void *reserved = mmap(NULL, exported->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (reserved == MAP_FAILED) return 2;
            mapped[i] = (Mapped){(uint64_t)reserved, exported->size, fd, opened, *exported};
            *address = (uint64_t)reserved;
            return OK;
        }
    return 2;
}

static void unmap(Mapped *m) {
    munmap((void *)m->address, m->size);
    close(m->fd);
    m->size = 0;
}

int cuInit(unsigned flags) {
    int result = number("STUB_CUDA_INIT", flags ? INVALID_VALUE : OK);
    if (result == OK && number("STUB_CUDA_DEVICES", 1) == 0) return NO_DEVICE;
    initialised = result == OK;
    return result;
}
int cuDeviceGetCount(int *count) {
    if (!initialised) return NOT_INITIALIZED;
    *count = number("STUB_CUDA_DEVICES", 1);
    return OK;
}
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= number("STUB_CUDA_DEVICES", 1)) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(0x1000 + device);
    return OK;
}
int cuCtxPushCurrent_v2(void *context) {
    if (!context || depth == 16) return INVALID_CONTEXT;
    stack[depth++] = (int)((intptr_t)context - 0x1000);
    return OK;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(intptr_t)(0x1000 + stack[--depth]);
    return OK;
}
int cuStreamCreate(void **stream, unsigned flags) {
    if (!depth) return INVALID_CONTEXT;
    if (flags != 1) return INVALID_VALUE;
    *stream = malloc(1);
    return OK;
}
int cuStreamSynchronize(void *stream) { return !depth ? INVALID_CONTEXT : stream ? OK : INVALID_HANDLE; }

/* What a client needs. */
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    static int count;
    if (!depth) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Exported exported = {"CUDA", stack[depth - 1], size, ""};
    snprintf(exported.name, sizeof exported.name, "/abserve_cuda_stub_%d_%d", (int)getpid(), count++);
    int fd = shm_open(exported.name, O_CREAT | O_EXCL | O_RDWR, 0600), result = 2;
    if (fd >= 0 && ftruncate(fd, size) == 0) result = map(fd, &exported, 0, address);
    pthread_mutex_unlock(&lock);
    return result;
}
int cuMemFree_v2(uint64_t address) {
    pthread_mutex_lock(&lock);
    Mapped *m = find(address);
    if (m) { shm_unlink(m->exported.name); unmap(m); }
    pthread_mutex_unlock(&lock);
    return m ? OK : INVALID_VALUE;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
    Mapped *m = find(address);
    if (!m || m->opened) return INVALID_VALUE;
    memcpy(handle, &m->exported, sizeof *handle);
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
    Exported exported;
    memcpy(&exported, &handle, sizeof exported);
    if (!depth) return INVALID_CONTEXT;
    if (flags != 1 || memcmp(exported.magic, "CUDA", 4)) return INVALID_VALUE;
    if (exported.device != stack[depth - 1] && !number("STUB_CUDA_PEERS", 0)) return PEER_ACCESS;
    exported.name[sizeof exported.name - 1] = 0;
    int fd = shm_open(exported.name, O_RDWR, 0);
    if (fd < 0) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    int result = map(fd, &exported, 1, address);
    pthread_mutex_unlock(&lock);
    if (result == OK) note("open", exported.name);
    return result;
}
int cuIpcCloseMemHandle(uint64_t address) {
    if (!depth) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    Mapped *m = find(address);
    int good = m && m->opened && m->address == address;
    if (good) { note("close", m->exported.name); unmap(m); }
    pthread_mutex_unlock(&lock);
    return good ? OK : INVALID_VALUE;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    if (!depth) return INVALID_CONTEXT;
    Mapped *m = find(address);
    if (!m) return INVALID_VALUE;
    *base = m->address;
    *size = m->size;
    return OK;
}

static int copy(uint64_t address, void *host, size_t size, int to_host) {
    if (!depth) return INVALID_CONTEXT;
    if (there("lost")) return ILLEGAL_ADDRESS;
    Mapped *m = find(address);
    if (!m || address + size > m->address + m->size) return INVALID_VALUE;
    const char *gate = to_host ? "hold-read" : "hold-write";
    if (there(gate)) {
        char path[512];
        close(open(in_folder("held", path), O_CREAT | O_WRONLY, 0600));
        while (there(gate)) usleep(1000);
        if (find(address) != m) return ILLEGAL_ADDRESS; /* closed while it was being read */
    }
    off_t offset = address - m->address;
    for (size_t done = 0; done < size;) {
        ssize_t n = to_host ? pread(m->fd, (char *)host + done, size - done, offset + done)
                            : pwrite(m->fd, (char *)host + done, size - done, offset + done);
        if (n <= 0) return ILLEGAL_ADDRESS;
        done += n;
    }
    return OK;
}
int cuMemcpyDtoHAsync_v2(void *host, uint64_t address, size_t size, void *stream) {
    return stream ? copy(address, host, size, 1) : INVALID_HANDLE;
}
int cuMemcpyHtoDAsync_v2(uint64_t address, void *host, size_t size, void *stream) {
    return stream ? copy(address, host, size, 0) : INVALID_HANDLE;
}
int cuMemcpyDtoH_v2(void *host, uint64_t address, size_t size) { return copy(address, host, size, 1); }
int cuMemcpyHtoD_v2(uint64_t address, void *host, size_t size) { return copy(address, host, size, 0); }

int cuGetErrorName(int code, const char **name) {
    *name = code == INVALID_VALUE    ? "CUDA_ERROR_INVALID_VALUE"
            : code == NO_DEVICE      ? "CUDA_ERROR_NO_DEVICE"
            : code == PEER_ACCESS    ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
            : code == INVALID_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
            : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                     : NULL;
    return *name ? OK : INVALID_VALUE;
}
int cuGetErrorString(int code, const char **text) {
    *text = code ? "as the stub says" : "no error";
    return OK;
}
