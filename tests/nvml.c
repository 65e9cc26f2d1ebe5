/* As much of NVML as tfgpu asks, with answers made up after NVML's documentation, as a server of two H100 SXM GPUs (driver
   550.127.05) might give them, or of GPUS up to four; none is recorded; GPU 0, or the GPU AT, is what the environment makes of it, and GPU LOST does not answer. What is not here answers "function not found", as an old driver does. */
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned long long total, left, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } process_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct {
  unsigned field, scope; long long stamp, latency; int type, code; union { double d; unsigned long long u; } value;
} field_t;
static int told(const char *name, int usual) { return getenv(name) ? atoi(getenv(name)) : usual; }
static int first(void *gpu) { return gpu == (void *)(unsigned long)(told("AT", 0) + 1); }
int nvmlInitWithFlags(unsigned flags) { return told("INIT", 0); }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "550.127.05", size); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) {
  if (told("GONE", 0)) return 1;
  *count = told("GPUS", 2);
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
  if ((int)index == told("LOST", -1)) return 15;
  *gpu = (void *)(unsigned long)(index + 1);
  return 0;
}
static int is_slice(void *gpu) { return gpu > (void *)99; }
int nvmlDeviceGetName(void *gpu, char *text, unsigned size) { strncpy(text, "NVIDIA H100 80GB HBM3", size); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *text, unsigned size) {
  const char *uuids[] = {"GPU-1f0c5a92", "GPU-2e7d1b40", "GPU-3b6a90c1", "GPU-4c51d7e8"};
  strncpy(text, is_slice(gpu) ? "MIG-77aa" : uuids[((unsigned long)gpu - 1) % 4], size);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *memory) {
  if (!first(gpu) && told("LOST_UNDER_WAY", 0)) return 15;
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
int nvmlDeviceGetMigDeviceHandleByIndex(void *gpu, unsigned index, void **part) {
  if (!told("SLICES", 0) || index) return 6;
  *part = (void *)100;
  return 0;
}
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
/* What changes while a GPU works; OLD leaves out what Kepler to Pascal have not. */
int nvmlDeviceGetUtilizationRates(void *gpu, utilization_t *found) {
  if (is_slice(gpu) || told("MIG", 0)) return 3;
  found->gpu = first(gpu) ? told("BUSY", 93) : 40;
  found->memory = told("TRAFFIC", 51);
  return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) { *milliwatts = told("POWER_MW", 412000); return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *millijoules) {
  if (told("OLD", 0)) return 3;
  *millijoules = 5000000ull + told("ENERGY_MJ", 0);
  return 0;
}
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *megahertz) { *megahertz = kind == 2 ? 2619 : 1755; return 0; }
int nvmlDeviceGetPcieThroughput(void *gpu, int kind, unsigned *kilobytes) {
  *kilobytes = kind == 0 ? told("PCIE_SENT_KB", 1000) : told("PCIE_RECEIVED_KB", 2000000);
  return told("OLD", 0) ? 3 : 0;
}
int nvmlDeviceGetFieldValues(void *gpu, int count, field_t *found) {
  for (int at = 0; at < count; at++) {
    if (found[at].field == 90) {
      found[at].code = told("OLD", 0) ? 3 : 0;
      found[at].value.u = told("NVLINK_MBPS", 25000);
      continue;
    }
    found[at].code = told("OLD", 0) || found[at].scope != 0xFFFFFFFF ? 3 : 0;
    found[at].value.u = (found[at].field == 138 ? 1000 : 2000) + told("NVLINK_KIB", 0);
  }
  return 0;
}
