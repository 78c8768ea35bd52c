// What an executor does with weights: gathers them for code, compiled or not, and keeps up with who changes
// them.
//
// gather() brings a whole weight into a fresh tensor on the weights' stream; the caller's stream waits before
// the tensor is used, and the allocator frees it in stream order afterwards. All methods may be called from
// any thread.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "context.h"
#include "transport/transports.h"
#include "weights/access.h"
#include "weights/compute_copies.h"
#include "weights/edits.h"
#include "weights/first_groups.h"
#include "weights/gather_log.h"
#include "weights/gatherer.h"
#include "weights/host_shards.h"
#include "weights/resident.h"

namespace lightning_zero {

class Weights {
 public:
  Weights(Context& context, Transports& transports, Communicators& comms);

  // -- ops
  at::Tensor gather(int64_t index, at::IntArrayRef shape, at::ScalarType dtype, bool tracked);
  at::Tensor gather_start(int64_t index, at::IntArrayRef shape, at::ScalarType dtype);
  // Several weights in one launch into one tensor of `numel` elements: weight i, padded, behind weight i - 1.
  at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel);
  // Weights that stay until the optimizer steps: gathers them into their memory unless they are there.
  void resident_start(at::TensorList resident, at::TensorList shards);
  // A compiled graph begins that gathers and reduces as `plan` says: all ranks must be known to have that
  // plan, and what it reads must be readable.
  void check_plan(const std::string& digest, const std::string& plan);

  // -- when shards change
  // Something is about to change shards; and it has. Harmless when repeated. Where ranks take no turns, the
  // first makes compute copies old, and the second does nothing. `stepping`: an optimizer is, which sees to
  // the copies of shards on the host.
  void begin_writing(bool stepping);
  void end_writing();
  // Shards may have changed in ways that leave no trace (a replayed graph): write compute copies again before
  // use. Nothing where ranks take turns, or are those of several hosts: there begin_writing() is what counts.
  void expire_compute_shards();
  // A training step of compiled code begins: refreshes all compute copies, if there are any, and starts to
  // fetch what the last step's graph fetched first.
  void refresh_compute_shards();
  // Ranks come to a barrier where they read each other's copies: these are brought up to date, and may be
  // read by what is queued on the current stream.
  // `ahead`: a graph is about to be captured; done only where what is captured depends on it, and then not
  // once more before its replay, see Access::let_read_ahead(). Whether it was done.
  bool sync_compute_shards(bool ahead = false);

  // A backward ends that has brought no gradient on this rank: gathers what its peers gather, see
  // [Note: a rank without gradients].
  void repeat_gathers();
  GatherLog& log() { return log_; }

  // Name of an op `(str digest, str plan) -> ()` that is called before a graph with a plan not seen before
  // runs; it may raise.
  void on_new_plan(std::string op) { new_plan_op_ = std::move(op); }

  Access& access() { return access_; }
  ComputeCopies& copies() { return copies_; }
  Edits& edits() { return edits_; }
  ResidentWeights& resident() { return resident_; }
  FirstGroups& first() { return first_; }
  // Null on one host.
  Exchange* exchange() { return host_shards_ ? &host_shards_->exchange() : nullptr; }
  size_t watched() const { return edits_.watched(); }  // by edits()
  void close();

 private:
  void sync_edits_if_any();
  void note(GatherLog::Kind kind, at::ScalarType dtype, const std::vector<ParamRecord*>& records,
            int64_t numel = 0);
  void repeat(const GatherLog::Entry& entry);

  Context& context_;
  ComputeCopies copies_;
  std::unique_ptr<HostShards> host_shards_;  // null where there is one host
  Access access_;
  Gatherer gatherer_;
  FirstGroups first_;
  ResidentWeights resident_;
  Edits edits_;
  GatherLog log_;
  std::string new_plan_op_;
  std::set<std::string> plans_;  // digests of those that all ranks are known to have
};

}  // namespace lightning_zero
