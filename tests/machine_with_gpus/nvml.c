/* The part of NVIDIA's management library that torch counts GPUs with: $STANDIN_GPUS of them. */
#include <stdio.h>
#include <stdlib.h>

int nvmlInit(void) { return 0; }

int nvmlDeviceGetCount_v2(int *count) {
    const char *gpus = getenv("STANDIN_GPUS");
    *count = gpus ? atoi(gpus) : 0;
    return 0;
}

int nvmlDeviceGetHandleByIndex_v2(int index, void **handle) {
    *handle = (void *)(long)(index + 1);
    return 0;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-%ld", (long)handle - 1);
    return 0;
}
