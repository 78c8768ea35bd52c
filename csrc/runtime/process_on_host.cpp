#include "runtime/process_on_host.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace lightning_zero {

namespace {

constexpr size_t kParent = 1, kStarted = 19;  // of the fields that follow a process's name

// Not by streams: where a compiler links its library statically they find another copy's locales, and crash.
std::string read(const std::string& path) {
  std::string text;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return text;
  char part[1024];
  for (ssize_t length; (length = ::read(file, part, sizeof(part))) > 0;)
    text.append(part, static_cast<size_t>(length));
  ::close(file);
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::string link(const std::string& path) {
  char target[256];
  const auto length = ::readlink(path.c_str(), target, sizeof(target));
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : std::string();
}

std::string of_process(int64_t pid, const char* what) {
  return read("/proc/" + std::to_string(pid) + "/" + what);
}

// State, parent, ... start time of a process, as text; empty when there is none.
std::vector<std::string> state_of(int64_t pid) {
  const auto text = of_process(pid, "stat");
  const auto end_of_name = text.rfind(')');  // the name may hold anything
  if (end_of_name == std::string::npos)
    return {};
  auto fields = split(text.substr(std::min(end_of_name + 2, text.size())), ' ');
  return fields.size() > kStarted && !fields[0].empty() ? fields : std::vector<std::string>();
}

// Whether /proc is that of the namespace in which this process has its number.
bool sees_itself() {
  return link("/proc/self") == std::to_string(::getpid());
}

}  // namespace

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const auto end = std::min(text.find(by, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string ProcessOnHost::own() {
  const auto pid = ::getpid();
  const auto state = state_of(pid);
  if (!sees_itself() || state.empty())
    return "";
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);  // hosts that were started from one image may share what follows
  return std::string(host) + "/" + read("/proc/sys/kernel/random/boot_id") + "|" + link("/proc/self/ns/pid") +
         "|" + std::to_string(pid) + "|" + state[kStarted];
}

std::optional<ProcessOnHost> ProcessOnHost::find(const std::string& what) {
  const auto theirs = split(what, '|'), ours = split(own(), '|');
  // The machine, and the namespace in which the number counts.
  if (theirs.size() != 4 || ours.size() != 4 || theirs[1].empty() || theirs[0] != ours[0] ||
      theirs[1] != ours[1])
    return std::nullopt;
  return ProcessOnHost{std::strtoll(theirs[2].c_str(), nullptr, 10), theirs[3]};
}

std::string ProcessOnHost::host_in(const std::string& what) {
  return what.substr(0, what.find('/'));
}

bool ProcessOnHost::is_alive() const {
  const auto state = state_of(pid);
  return !state.empty() && state[0] != "Z" && state[0] != "X" && state[kStarted] == started;
}

void kill_forked_children() {
  auto* processes = sees_itself() ? ::opendir("/proc") : nullptr;
  if (processes == nullptr)
    return;
  const auto own = std::to_string(::getpid());
  const auto command = of_process(::getpid(), "cmdline"), environment = of_process(::getpid(), "environ");
  while (const auto* entry = ::readdir(processes)) {
    const auto pid = std::strtoll(entry->d_name, nullptr, 10);
    if (pid <= 1)
      continue;
    const auto state = state_of(pid);
    if (state.empty() || state[kParent] != own)
      continue;
    const auto theirs = of_process(pid, "cmdline");
    if (theirs.find("--multiprocessing-fork") != std::string::npos ||
        (theirs == command && of_process(pid, "environ") == environment))
      ::kill(static_cast<pid_t>(pid), SIGKILL);
  }
  ::closedir(processes);
}

}  // namespace lightning_zero
