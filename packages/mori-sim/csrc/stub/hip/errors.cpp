// Error codes: their names, and the last one of a thread.
#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

const char* error_name(int code) {
  switch (code) {
    case kSuccess: return "hipSuccess";
    case kInvalidValue: return "hipErrorInvalidValue";
    case kOutOfMemory: return "hipErrorOutOfMemory";
    case kNotInitialized: return "hipErrorNotInitialized";
    case kInvalidConfiguration: return "hipErrorInvalidConfiguration";
    case kInvalidDevicePointer: return "hipErrorInvalidDevicePointer";
    case kInvalidDevice: return "hipErrorInvalidDevice";
    case kInvalidImage: return "hipErrorInvalidImage";
    case kInvalidContext: return "hipErrorInvalidContext";
    case kMapFailed: return "hipErrorMapFailed";
    case kFileNotFound: return "hipErrorFileNotFound";
    case kInvalidHandle: return "hipErrorInvalidHandle";
    case kIllegalState: return "hipErrorIllegalState";
    case kNotFound: return "hipErrorNotFound";
    case kNotReady: return "hipErrorNotReady";
    case kIllegalAddress: return "hipErrorIllegalAddress";
    case kLaunchTimeOut: return "hipErrorLaunchTimeOut";
    case kPeerAccessAlreadyEnabled: return "hipErrorPeerAccessAlreadyEnabled";
    case kPeerAccessNotEnabled: return "hipErrorPeerAccessNotEnabled";
    case kHostMemoryAlreadyRegistered: return "hipErrorHostMemoryAlreadyRegistered";
    case kHostMemoryNotRegistered: return "hipErrorHostMemoryNotRegistered";
    case kLaunchFailure: return "hipErrorLaunchFailure";
    case kNotSupported: return "hipErrorNotSupported";
    case kStreamCaptureUnsupported: return "hipErrorStreamCaptureUnsupported";
    case kStreamCaptureUnmatched: return "hipErrorStreamCaptureUnmatched";
    default: return "hipErrorUnknown";
  }
}

}  // namespace

extern "C" {

const char* hipGetErrorName(int code) { return error_name(code); }
const char* hipGetErrorString(int code) { return error_name(code); }
int hipDrvGetErrorName(int code, const char** text) { *text = error_name(code); return kSuccess; }
int hipDrvGetErrorString(int code, const char** text) { *text = error_name(code); return kSuccess; }
int hipPeekAtLastError() { return node().sticky_code() != 0 ? node().sticky_code() : last_error(); }
int hipGetLastError() {
  const int code = hipPeekAtLastError();
  last_error() = kSuccess;
  return code;
}

}  // extern "C"
