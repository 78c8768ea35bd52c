// What Linux tells of processes on this host.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lightning_zero {

// A process of this host, or none that can be seen from here.
struct ProcessOnHost {
  int64_t pid = 0;
  std::string started;       // by which a later process of the same number is told apart
  static std::string own();  // what others need to find this one
  static std::optional<ProcessOnHost> find(const std::string& what);
  static std::string host_in(const std::string& what);  // what that host calls itself; empty: not known
  bool is_alive() const;
};

// Kills what this process has forked without exec, or started by Python's multiprocessing: the workers of
// data loaders, which nobody else ends when it ends by std::_Exit(), and which may hang. Not the ranks that
// Lightning's launcher has started.
void kill_forked_children();

std::vector<std::string> split(const std::string& text, char by);

}  // namespace lightning_zero
