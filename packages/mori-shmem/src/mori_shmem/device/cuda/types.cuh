// The few types that kernels need, without any header: NVRTC then compiles a kernel in about a second.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;
#else
#include <stdint.h>
#endif

struct alignas(64) TensorMap {  // what cuTensorMapEncodeTiled writes; opaque
  uint64_t words[16];
};

#define DEVICE __device__ __forceinline__
