"""A stand-in for NVIDIA's driver library, in C: the real nvidia-ml-py loads and calls it."""

# As much of NVML as tfgpu asks, with the answers of a server of two H100 SXM GPUs (driver 550.127.05); GPU 0 is what
# the environment makes of it. What is not here answers "function not found", as an old driver does.
NVML = r"""
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, left, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
static int told(const char *name, int usual) { return getenv(name) ? atoi(getenv(name)) : usual; }
static int first(void *gpu) { return gpu == (void *)1; }
int nvmlInitWithFlags(unsigned flags) { return told("INIT", 0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "550.127.05", size); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  if (index == 1 && told("LOST", 0)) return 15;
  *gpu = (void *)(unsigned long)(index + 1);
  return 0;
}
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) { strncpy(text, "NVIDIA H100 80GB HBM3", size); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
  strncpy(text, first(gpu) ? "GPU-1f0c5a92" : "GPU-2e7d1b40", size);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *memory) {
  memory->total = 81559ull << 20;
  memory->used = first(gpu) ? (unsigned long long)told("USED_MIB", 4) << 20 : 4ull << 20;
  return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, process_t *found) {
  unsigned all = first(gpu) && told("PID", 0) ? 1 : 0;
  if (*count < all) { *count = all; return 7; }
  *count = all;
  if (all) { found->pid = told("PID", 0); found->used = 60ull << 30; }
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetPersistenceMode(void *gpu, int *mode) { *mode = first(gpu) ? told("PERSISTENCE", 1) : 1; return 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *value) { *value = told("CELSIUS", 34); return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *value) { *value = told("LIMIT_MW", 700000); return 0; }
int nvmlDeviceGetPowerManagementDefaultLimit(void *gpu, unsigned *value) { *value = 700000; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
  *bits = first(gpu) ? told("REASONS", 1) : 1;
  return 0;
}
int nvmlDeviceGetEccMode(void *gpu, int *now, int *next) { *now = *next = 1; return 0; }
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *count) {
  *count = kind == 1 && first(gpu) ? told("UNCORRECTED", 0) : 0;
  return 0;
}
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *corrected, unsigned *bad, unsigned *pending, unsigned *failed) {
  *corrected = *bad = 0;
  *pending = first(gpu) ? told("PENDING", 0) : 0;
  *failed = first(gpu) ? told("FAILED", 0) : 0;
  return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *gpu, int *pending) { return 3; }
int nvmlDeviceGetMigMode(void *gpu, unsigned *now, unsigned *next) {
  *now = *next = first(gpu) ? told("MIG", 0) : 0;
  return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *gpu, unsigned *count) { *count = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **part) { return 6; }
int nvmlDeviceGetCurrPcieLinkWidth(void *gpu, unsigned *width) { *width = told("LANES", 16); return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *gpu, unsigned *width) { *width = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *gpu, unsigned *number) { *number = 5; return 0; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, int *is_up) {
  *is_up = !(first(gpu) && (int)link < told("DOWN", 0));
  return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *gpu, void *other, int *level) { *level = 50; return 0; }
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric_t;
int nvmlDeviceGetGpuFabricInfo(void *gpu, fabric_t *fabric) {
  fabric->status = 0;
  fabric->state = first(gpu) ? told("FABRIC", 3) : 3;
  return 0;
}
int nvmlDeviceGetP2PStatus(void *gpu, void *other, int kind, int *status) { *status = told("P2P", 0); return 0; }
typedef struct { unsigned gpu, memory; } utilization_t;
int nvmlDeviceGetUtilizationRates(void *gpu, utilization_t *rates) {
  rates->gpu = first(gpu) ? told("BUSY", 97) : 0;
  rates->memory = first(gpu) ? 61 : 0;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) {
  if (told("NO_POWER", 0)) return 3;
  *milliwatts = first(gpu) ? 652340 : 71200;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *millijoules) {
  if (told("NO_POWER", 0)) return 3;
  static unsigned long long drawn = 123456000;
  *millijoules = drawn += 500000;
  return 0;
}
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *mhz) { *mhz = first(gpu) ? 1755 : 345; return 0; }
int nvmlDeviceGetMaxClockInfo(void *gpu, int kind, unsigned *mhz) { *mhz = 1980; return 0; }
int nvmlDeviceGetPcieThroughput(void *gpu, int way, unsigned *kilobytes) { *kilobytes = way ? 2048 : 512; return 0; }
typedef struct { unsigned field, scope; long long time, latency; int type, code; unsigned long long value; } field_t;
int nvmlDeviceGetFieldValues(void *gpu, int count, field_t *fields) {
  for (int at = 0; at < count; at++) {
    fields[at].code = told("NO_NVLINK", 0) ? 3 : 0;
    fields[at].value = fields[at].field == 138 ? 4096 : 1024;
  }
  return 0;
}
"""
