#include "weights/recording.h"

#include "over_copies.h"

namespace lightning_zero {

std::string WeightRecording::disabled_reason() const {
  if (weights_.resident().any_arriving())
    return "weights that stay resident over a step are still on their way";
  if (weights_.edits().watched() > 0)
    return "code that is not compiled holds weights";
  return {};
}

void WeightRecording::begin() {
  // Nothing that was launched before may be waited for inside, and nothing inside from without.
  weights_.first().forget();
  over_copies::note_reads(context_);
  weights_.resident().begin_recording();
  weights_.copies().recording = true;
  gathered_before_ = weights_.log().size();
  if (auto* exchange = weights_.exchange())
    exchange->begin_recording();
}

std::string WeightRecording::finish() const {
  if (weights_.resident().any_arriving())
    return "weights that stay resident over a step arrive in another graph";
  return {};
}

WeightRecording::Recorded WeightRecording::end() {
  weights_.copies().recording = false;
  auto* exchange = weights_.exchange();
  auto gathers = weights_.log().take_from(gathered_before_);
  if (!has_streams(context_.device))
    weights_.log().append(gathers);  // what a CPU records takes place
  return {weights_.resident().end_recording(), exchange ? exchange->end_recording() : Exchange::Recorded{},
          over_copies::reads(context_), std::move(gathers)};
}

bool WeightRecording::fits(const Recorded& graph, std::set<int64_t>& gathered) const {
  const auto* exchange = weights_.exchange();
  return weights_.resident().finds_all(graph.resident, gathered) &&
         (exchange == nullptr || exchange->fits(graph.exchange));
}

void WeightRecording::before_replay(const Recorded& graph) {
  weights_.sync_compute_shards();
  weights_.log().append(graph.gathers);
  for (const auto index : graph.read) over_copies::check(context_.at(index));
  if (auto* exchange = weights_.exchange())
    exchange->before_replay(graph.exchange);
}

}  // namespace lightning_zero
