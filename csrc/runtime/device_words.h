// Integers in pinned memory of the host: what kernels by which ranks wait tell the watchdog, and where it
// ends their waits. Of 32 bits, as the numbers that devices count with.
#pragma once

namespace lightning_zero::device_words {

constexpr int BARRIERS = 2;  // lanes of them: gradients, weights
constexpr int READERS = 2;   // of what hosts exchange: see Reader in weights/exchange.h

constexpr int STOP = 0;  // not 0: nobody must wait any more
// How many barriers of a lane this device has come to, and how many it has passed.
constexpr int arrived(int channel) {
  return 1 + 2 * channel;
}
constexpr int passed(int channel) {
  return 2 + 2 * channel;
}
// Of the parts that hosts exchange: this device has sent its own of so many, and got so many.
constexpr int SENT = 1 + 2 * BARRIERS, RECEIVED = SENT + 1;
// The part for which a reader waits, or has waited last; and the last one that it has waited for.
constexpr int wanted(int reader) {
  return RECEIVED + 1 + 2 * reader;
}
constexpr int got(int reader) {
  return RECEIVED + 2 + 2 * reader;
}
constexpr int COUNT = RECEIVED + 1 + 2 * READERS;

}  // namespace lightning_zero::device_words
