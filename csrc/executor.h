// The Executor gathers weights and reduces gradients for one engine.
//
// A weight: gather() all-gathers a shard into a fresh tensor on the all-gather group's stream; the caller's
// stream waits before the tensor is used, and the allocator frees it in stream order afterwards.
//
// A gradient: reduce() copies it into its bucket on the caller's stream. Complete buckets are
// reduce-scattered in one fixed order on the other group's stream and accumulated into the gradient arena
// there. When autograd finishes, end_backward() makes the ranks agree on what is still missing, sends it,
// lets the caller's stream wait once, and attaches param.grad.
//
// [Note: one order on every rank] A rank may see gradients its peers do not. Buckets are therefore launched
// strictly in order, a bucket that is not complete holds back the ones behind it, and end_backward() takes
// the maximum over ranks of what arrived (on a host group: no device is read) before it launches the rest. A
// gradient that arrives after its bucket was launched (a weight used in two graphs) waits in a second bucket
// that is launched after the agreement.
//
// [Note: copies from peers] Where all ranks can read each other's shadows, compiled graphs fetch weights by
// plain copies: a copy engine does them, no multiprocessor, and no rank waits for another. What makes it safe
// is that a shadow changes only at points which every rank passes: before the forward of a training step
// (write_shadows) and where a compiled graph begins (enter). There, all ranks have read what they wanted
// (first barrier), stale shadows are written, and all ranks have written theirs (second barrier). Eager code,
// which may find a stale shadow anywhere, casts the shard instead and gathers through the process group.
//
// [Note: turns] Where all ranks can read the shards themselves, everybody reads what it
// wants when it wants, out of shadows and shards, and ranks need not read the same: what changes shards says
// so before (begin_writing), and ranks take turns. See turns.h. There are no meetings where graphs begin, and
// eager code copies, too. Whether eager code has edited a weight that it was given must be told alike on
// every rank, and without a look at values on a device: its memory is marked as copy-on-write, with nobody to
// share it, so that whoever may write to it takes the mark away. Only then values are compared.
//
// [Note: gradients pushed to peers] Likewise, where ranks can write into each other's memory, a bucket is not
// reduce-scattered: each rank copies every peer's part into that peer's staging memory, all meet (a barrier),
// and each adds up what it was sent, in float32. Staging memory has two halves, used in turn: whoever passes
// the barrier of one round knows that all have added up the round before it, so its half may be written
// again.
//
// [Note: captured graphs] A compiled graph's forward and backward may be captured as graphs of the device and
// replayed. While one is recorded, ops queue what they always queue, but agree on nothing and call nobody;
// what the run would have changed here is noted. A replay consists of before_replay(), which does what must
// be done each time anew (meet peers whose shadows are read, join autograd's backward, decide whether
// gradients are added), the graph, and after_replay(), which brings the books up to date. What is queued is
// the same, so a rank may replay what another runs. Recorded are only backwards whose gradients fill whole
// buckets, from the first on.
//
// State is per parameter and backward, never per graph. All methods may be called from autograd's threads.
#pragma once

#include <torch/custom_class.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradients/bucket.h"
#include "param_registry.h"
#include "runtime/device_turns.h"
#include "transport/communicator.h"

namespace lightning_zero {

struct ExecutorOptions {
  int64_t bucket_bytes = 64 << 20;
  bool double_buffer = true;
  bool predivide = true;      // scale by 1/ranks while copying in, then sum; otherwise the group averages
  bool free_buckets = false;  // give bucket memory back at the end of each backward
  bool sync_collectives = false;
  bool poison = false;  // see Communicator::poison; and memory of weights and buckets is NaN when it is
                        // handed out or given back
  std::optional<at::ScalarType> reduce_dtype;  // on the wire; the parameter's own when empty
};

class Executor : public torch::CustomClassHolder {
 public:
  Executor(const std::string& gather_group, const std::string& reduce_group, const std::string& control_group,
           const std::string& device);
  ~Executor() override;

  void configure(ExecutorOptions options);
  // Who watches over the waits for other ranks.
  void watch(c10::intrusive_ptr<Watchdog> watchdog);
  // Name of an op `() -> ()` that runs Python hooks on gradients after they are attached; "" for none.
  void on_backward_end(std::string op) { backward_end_op_ = std::move(op); }

  // Name of an op `(str digest, str plan) -> ()` that is called before a graph with a plan not seen before
  // runs; it may raise.
  void on_new_plan(std::string op) { new_plan_op_ = std::move(op); }

  int64_t add_parameter(std::string name, at::Tensor param, at::Tensor shard, int64_t numel,
                        std::vector<int64_t> shape, std::vector<int64_t> order);
  // Another piece of memory with the same values: shards move into an arena once all are known.
  void move_parameter(int64_t index, at::Tensor shard);
  // Nobody reads it any more: it was tied to another while the model was built.
  void drop_parameter(int64_t index);
  // Backward raises when autograd brings this shard a gradient: something was computed with the shard itself.
  void guard_gradient(int64_t index);
  void set_grad(int64_t index, at::Tensor grad) { at(index).grad = std::move(grad); }
  void set_kept(int64_t index, at::Tensor kept) { at(index).kept = std::move(kept); }
  void set_shadow(int64_t index, at::Tensor shadow) { at(index).shadow = std::move(shadow); }
  // All shadows in one tensor, of the shards in another: written in one kernel.
  void add_shadow_memory(at::Tensor copies, at::Tensor shards);
  // The parameter's shadow on every rank, in memory that this process can read. See [Note: copies from
  // peers].
  void set_peers(int64_t index, std::vector<at::Tensor> peers);
  // The same for a copy in the parameter's own dtype.
  void set_exact(int64_t index, at::Tensor copy, std::vector<at::Tensor> peers);
  // Shards lie in memory that all ranks can read, from now on: each rank's number of its turn. On every rank,
  // which meet before the next gather. See [Note: turns].
  void take_turns(std::vector<at::Tensor> numbers);
  // The same on devices: the kernels of turns.cu, and of each rank a number for each rank. After
  // set_barrier().
  void take_device_turns(const at::Tensor& code, std::vector<at::Tensor> rows);
  // The parameter's shard on every rank. Only where ranks take turns.
  void set_shards(int64_t index, std::vector<at::Tensor> shards);
  // Something is about to change shards; and it has. Harmless when repeated. Where ranks take no turns, the
  // first is expire_shadows(), and the second nothing.
  void begin_writing();
  void end_writing();
  bool takes_turns() const { return turns_ != nullptr; }
  // Shards may have changed in ways that leave no trace (param.data, a replayed graph): write shadows again
  // before use.
  void expire_shadows();
  // A stage of training or evaluation begins, on every rank: steps are counted alike from now on, although an
  // exception may have ended the stage before at another step on each.
  void begin_stage();
  // A training step begins, on every rank: what ranks had missed of each other in an interrupted one is over.
  void begin_epoch();
  // A training step begins: writes all shadows, and starts to fetch what the last step's graph fetched first.
  void write_shadows();
  void close();

  at::Tensor gather(int64_t index, at::IntArrayRef shape, at::ScalarType dtype, bool tracked);
  at::Tensor gather_start(int64_t index, at::IntArrayRef shape, at::ScalarType dtype);
  // Several weights in one launch into one tensor of `numel` elements: weight i, padded, behind weight i - 1.
  at::Tensor gather_group(at::TensorList shards, at::ScalarType dtype, int64_t numel);
  // Weights that stay until the optimizer steps: gathers them into their memory unless they are there.
  void keep_start(at::TensorList kept, at::TensorList shards);
  void keep_wait(at::TensorList shards);
  // `hold`: the caller leaves the gradient's memory alone until it calls release().
  void reduce(int64_t index, const at::Tensor& grad, bool hold = false);
  void release(int64_t index);
  // Memory of each rank that this one can write, of two halves. See [Note: gradients pushed to peers].
  // `group_name`: by which they are symmetric memory, on an accelerator.
  void set_staging(std::vector<at::Tensor> staging, const std::string& group_name, int64_t timeout_ms);
  // How ranks meet on their devices, instead of by torch's barriers; see DeviceBarrier.
  void set_barrier(const at::Tensor& code, std::vector<at::Tensor> rows, at::Tensor words);
  // Kernels that add up what is pushed; see RowMeans.
  void use_means(const at::Tensor& code) { means_ = RowMeans(code, size()); }
  // Whether one of them has written, or added, the mean over the rows of `from` to `to`.
  bool mean_rows(const at::Tensor& to, const at::Tensor& from, bool add) const {
    return means_(to, from, add);
  }
  // A compiled graph begins that gathers and reduces as `plan` says.
  void enter(const std::string& digest, const std::string& plan);

  // Copies edits made to weights that eager code still holds, or held last, into their shards. `forget`: and
  // stop watching them, because the shards are about to change.
  void sync_edits(bool forget);
  // Lets go of all weights that eager code was given; edits to come of those it still holds are not seen.
  void drop_weights();
  int64_t find_gathered(const at::Tensor& tensor);

  // See [Note: captured graphs]. Why nothing can be recorded now; empty when it can.
  std::string why_not_recorded() const;
  // `adding`: to the gradients that are there, rather than in their place.
  void record_graph(bool backward, bool adding);
  int64_t end_recording();  // its number; throws NotImplementedError where a replay would not be the same
  void abort_recording();
  // Whether replays of these would do what runs would.
  bool fits(int64_t forward, int64_t backward) const;
  void never_ran(int64_t graph);  // what it was to leave behind is not there
  void drop_graph(int64_t graph);
  void meet_peers();  // so that shadows are up to date, and may be read
  void before_replay(int64_t graph);
  void after_replay(int64_t graph);
  // Whether gradients are there, to which a backward that begins now would add.
  bool has_gradients() const;
  // Whether the backward that goes on is for all gradients, and not for those of backward(inputs=...).
  bool is_whole_backward() const;
  // Changes when shards may have.
  int64_t epoch() const { return epoch_; }
  int64_t backwards() const { return backwards_; }  // that have ended
  // Something that the ranks' next agreement, at the end of a backward, carries along; and whether, since the
  // last question, some rank had something to say.
  void say_at_agreement(bool yes) { to_say_ = yes; }
  bool was_said() { return std::exchange(said_, false); }

  void end_backward();
  void abort_backward();   // drops what an interrupted backward left
  void release_buffers();  // bucket memory; legal outside backward

  // Changes whenever a parameter's gradient comes, goes or lies elsewhere.
  int64_t gradients_key() const;
  std::vector<int64_t> attached() const {
    return attached_;
  }  // parameters with a gradient from the last backward
  std::map<std::string, int64_t> counters() const;
  void reset_counters() { counters_.clear(); }
  int64_t size() const { return gather_comm_.size(); }
  int64_t rank() const { return gather_comm_.rank(); }

 private:
  // A weight that eager code was given.
  struct Tracked {
    at::Tensor flat;  // 1-D, padded
    int64_t index;
    uint32_t version;  // of the parameter when it was gathered
    // What code was given: views of `flat`, until somebody assigns other memory to one's `data`.
    std::vector<at::Tensor> given;
    uint64_t edits = 0;  // edits() when its shard changed, after which edits come too late
    bool held();
    uint64_t edits_seen() const;
  };
  struct Position {
    int64_t bucket = -1;
    int64_t slot = -1;
  };
  class Round;
  // Weights that are fetched in one launch into one tensor, and such a fetch that has begun.
  struct Group {
    std::vector<ParamRecord*> records;
    at::ScalarType dtype;
    int64_t numel;
    bool operator==(const Group&) const = default;
  };
  struct Ahead {
    Group group;
    at::Tensor buffer;
    Pending pending;
  };

  struct Recorded {
    bool adding = false;
    int64_t plan = 0;  // of buckets
    std::vector<const void*> grads;
    std::vector<int64_t> arrivals;
    size_t launched = 0;
    int64_t rounds = 0, meetings = 0;
    std::vector<int64_t> kept, kept_before;  // weights that it gathers to keep; that must be there already
    std::map<std::string, int64_t> counters;
  };
  struct Recording {
    Recorded graph;
    // Of the backward that goes on around it.
    std::vector<int> tasks;
    std::vector<int64_t> arrivals;
  };
  const Recorded& recorded(int64_t graph) const;
  void forget_recording();
  void forget_kept(const Recorded& graph);

  ParamRecord& at(int64_t index) { return *records_.at(static_cast<size_t>(index)); }
  at::Tensor fresh(int64_t numel, const at::TensorOptions& options);
  // Memory for the whole weight, unless the caller has some.
  at::Tensor allocate(const ParamRecord& record, at::ScalarType dtype, at::Tensor output = {});
  at::Tensor gather_into(ParamRecord& record, at::ScalarType dtype, Pending& pending, at::Tensor output = {});
  void take_assigned(Tracked& weight);
  void refuse_late_edits();
  void take_edits();
  bool is_edited(const Tracked& weight);
  void copy_edit(const Tracked& weight);
  void begin_reading();
  void begin_turn_to_write();
  bool is_stale(const ParamRecord& record) const;
  bool is_kept(const ParamRecord& record) const;
  void keep(ParamRecord& record);
  void shadow_is_written(ParamRecord& record);
  void write_shadow(ParamRecord& record);
  // `wait`: the current stream, too, and not only what this executor launches.
  void publish(bool everything, bool wait = false);
  void write_all_shadows();
  // On every rank, where they can be read; empty where they cannot.
  static const std::vector<at::Tensor>& copies_of(const ParamRecord& record, at::ScalarType dtype);
  bool can_copy(const std::vector<ParamRecord*>& records, at::ScalarType dtype) const;
  Pending fetch(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs,
                std::vector<at::Tensor>& sources);
  bool can_read(const std::vector<ParamRecord*>& records) const;
  Pending read(const std::vector<ParamRecord*>& records, std::vector<at::Tensor> outputs);
  // `sources` must live until the group has arrived.
  Ahead start(Group group, std::vector<at::Tensor>& sources);
  at::Tensor take_ahead(const std::vector<ParamRecord*>& records, at::ScalarType dtype, int64_t numel);
  void drop_ahead();
  // The shard in `dtype`, from the shadow where there is one; undefined when a cast is needed.
  at::Tensor source_in(ParamRecord& record, at::ScalarType dtype);
  at::ScalarType wire_dtype(const ParamRecord& record) const;
  void count(const char* what, int64_t by = 1) { counters_[what] += by; }

  void join_round();
  void plan_buckets();
  void expect_buckets();
  bool plan_is_stale() const;
  void ensure_grad(ParamRecord& record);
  void open(ReduceBucket& bucket, bool adding);
  void launch(ReduceBucket& bucket);
  void push(ReduceBucket& bucket);
  void launch_complete();
  void launch_all();
  std::vector<int64_t> agree();
  void learn_order(const std::vector<int64_t>& agreed);
  void attach(const std::vector<int64_t>& flags);
  void finish_round();
  BufferPool& pool(at::ScalarType dtype);

  void touch(const ParamRecord& record) const {
    if (watchdog_)
      watchdog_->touch(record.name);
  }

  c10::Device device_;
  c10::intrusive_ptr<Watchdog> watchdog_;
  Communicator gather_comm_, reduce_comm_;
  std::optional<Communicator> control_comm_;
  ExecutorOptions options_;
  std::string backward_end_op_, new_plan_op_;
  std::set<std::string> plans_;  // digests of those that all ranks are known to have

  std::vector<std::unique_ptr<ParamRecord>> records_;
  GatheredTable gathered_;
  std::vector<Tracked> tracked_;
  // All-gathers into kept memory that have not been waited for, by parameter.
  struct Arriving {
    Pending pending;
    std::vector<at::Tensor> sources;
  };
  std::unordered_map<int64_t, std::shared_ptr<Arriving>> arriving_;
  std::vector<Tracked> outdated_;  // still held although their shards have changed

  std::vector<std::pair<at::Tensor, at::Tensor>> shadow_memory_;
  std::unique_ptr<Turns> turns_;
  bool shared_ = false;     // some shadow is read by peers
  bool published_ = false;  // every rank's shadows may be read, until the next point where they change
  // The first groups that a training step's compiled code fetches, as the last step showed, and those on the
  // way.
  std::vector<Group> first_groups_;
  bool noting_first_ = false;
  std::deque<Ahead> ahead_;

  std::vector<int64_t> order_;         // trainable parameters in the order their gradients are sent
  std::vector<int> expected_;          // arrivals per backward, by parameter
  std::vector<Position> position_;     // by parameter
  std::vector<ReduceBucket> buckets_;  // launched in this order
  std::vector<ReduceBucket> late_;     // second chance, one for each bucket
  std::unordered_map<int, std::unique_ptr<BufferPool>> pools_;
  bool order_learned_ = false;
  int64_t plans_made_ = 0;

  std::vector<int64_t> arrivals_;  // this backward, in order
  size_t next_launch_ = 0;
  std::vector<at::Tensor> staging_;             // bytes, by rank
  RowMeans means_;                              // of what comes there
  int64_t rounds_ = 0;                          // of pushing, this backward
  int64_t meetings_ = 0, meetings_before_ = 0;  // of all ranks, ever, and before this backward
  std::vector<int> tasks_;                      // autograd graph tasks that will call end_backward()
  std::vector<int64_t> attached_;

  std::optional<Recording> recording_;
  std::shared_ptr<DeviceBarrier> barrier_;
  int64_t epochs_ = 0;                  // training steps begun, of the barrier and of turns
  bool interrupted_ = false;            // a backward was, and devices were let through their barriers
  std::map<int64_t, Recorded> graphs_;  // by their numbers
  int64_t graphs_made_ = 0;
  // What was there before a replay that overwrites it.
  std::vector<std::pair<at::Tensor, at::Tensor>> apart_;

  int64_t epoch_ = 0, backwards_ = 0;
  bool to_say_ = false, said_ = false;
  std::map<std::string, int64_t> counters_;
  PoolStats pool_stats_;
  mutable std::recursive_mutex mutex_;
};

}  // namespace lightning_zero
