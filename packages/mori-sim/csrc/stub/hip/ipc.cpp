// hipMalloc'ed memory between processes: the handle names the exporter's descriptor, which /proc opens again.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "stub/hip/door.hpp"

using namespace mori_sim;

namespace {

struct IpcHandle {  // 64 bytes
  uint64_t magic;
  int32_t pid, fd;
  uint64_t inode, offset, nbytes;
  uint8_t unused[24];
};
static_assert(sizeof(IpcHandle) == 64);
constexpr uint64_t kIpcMagic = 0x6d6f72692d697063ull;

}  // namespace

extern "C" {

int hipIpcGetMemHandle(void* out, void* memory) {
  HIP("hipIpcGetMemHandle", {
    need(out, "handle");
    Range range;
    if (!node().memory.find(at(memory), &range) || range.kind != RangeKind::allocation)
      throw ApiError(kInvalidValue, node().memory.describe(at(memory)) + ": only hipMalloc'ed memory has an IPC handle");
    struct stat status;
    fstat(range.backing->fd, &status);
    const IpcHandle handle{kIpcMagic, getpid(), range.backing->fd, status.st_ino, at(memory) - range.begin, range.end - range.begin, {}};
    range.backing->exported = true;
    std::memcpy(out, &handle, sizeof handle);
  });
}
int hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned) {
  HIP("hipIpcOpenMemHandle", {
    need(out, "pointer");
    if (handle.magic != kIpcMagic) throw ApiError(kInvalidValue, "not an IPC handle of this node");
    if (handle.pid == getpid()) throw ApiError(kInvalidContext, "the process that exported the memory cannot open it again");
    const std::string path = "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_ino != handle.inode) {
      if (fd >= 0) close(fd);
      throw ApiError(kInvalidValue, "the memory of process " + std::to_string(handle.pid) + " is gone, or that process may not be looked into");
    }
    BackingPtr backing = AddressSpace::import_fd(fd);
    close(fd);
    const uint64_t begin = node().memory.open_imported(backing);
    opened_ipc()[begin + handle.offset] = begin;
    *out = pointer(begin + handle.offset);
  });
}
int hipIpcCloseMemHandle(void* memory) {
  HIP("hipIpcCloseMemHandle", {
    const auto found = opened_ipc().find(at(memory));
    if (found == opened_ipc().end()) throw ApiError(kInvalidValue, "not opened from an IPC handle");
    if (node().sticky_code() == 0) node().synchronize_device(node().current_device());
    node().memory.release(found->second);
    opened_ipc().erase(found);
  });
}

}  // extern "C"
