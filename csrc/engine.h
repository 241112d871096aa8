// Jobs: transfers that are submitted here and carried out on the engine's own threads.
//
// Contract of submit(): it validates every id, copies them, and returns; it never waits for a
// transfer, and what it costs depends on the number of block pairs alone. Bad input throws
// std::invalid_argument and nothing is queued. The caller may reuse its arrays at once.
// Contract of the queries: done() and finished() never wait; wait() returns false at its time-out.
//
// What must stay true:
//  * a job starts when all earlier jobs that it overlaps with (conflicts.h) are finished; a
//    cancelled job keeps its place in that order, so that nobody overtakes through it;
//  * whatever a job points to (plan, ids, the caller's `keep`) outlives its last byte; `keep` is let
//    go on a thread that calls into the engine, never on a worker, for dropping it may need Python;
//  * workers belong to the process that started them: after fork() the child's copy of an engine
//    refuses to be used, and its destruction touches no thread.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "home.h"
#include "intake.h"
#include "mover.h"

namespace vkvmap {

enum class Lane : uint8_t { Store = 0, Load = 1, Expedited = 2 };
constexpr size_t kNumLanes = 3;

constexpr size_t kMaxFailures = 4096;

enum class JobState : uint8_t { Waiting, Running, Done };

struct JobResult {
  uint64_t bytes = 0;
  uint64_t fragments = 0;
  uint64_t pages = 0;  // (layer, block) pages moved
  double queue_seconds = 0;
  double copy_seconds = 0;
  bool cancelled = false;
  std::string error;  // empty: every byte is in place
  uint64_t failed_pages = 0;
  std::vector<PageFailure> failures;  // the first kMaxFailures of them
};

class Engine;

class Job {
 public:
  uint64_t id() const { return seq_; }
  uint64_t tag() const { return tag_; }
  Direction direction() const { return direction_; }
  Lane lane() const { return lane_; }
  const char* mover_name() const { return mover_->name(); }
  const Plan& plan() const { return *plan_; }

  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait(double seconds);  // negative: for ever
  const JobResult& result() const { return result_; }  // of a job that is done
  bool cancel();  // false if it had begun already

 private:
  friend class Engine;

  struct Progress {
    ProgressWords words;
    std::vector<uint64_t> left;  // units per layer id that are not in place yet
    std::vector<bool> failed;
  };

  uint64_t seq_ = 0;
  uint64_t tag_ = 0;
  Direction direction_ = Direction::Store;
  Lane lane_ = Lane::Store;
  Mover* mover_ = nullptr;
  bool report_ = true;
  bool notify_ = false;
  const Home home_;  // for wait() in a forked child
  std::weak_ptr<Engine> engine_;
  std::shared_ptr<const Plan> plan_;

  // Under the engine's mutex, until done.
  JobState state_ = JobState::Waiting;
  Transfer transfer_;
  std::shared_ptr<void> keep_;
  std::unique_ptr<Progress> progress_;
  std::vector<std::shared_ptr<Job>> dependents_;
  uint64_t dependencies_ = 0;  // jobs it still waits for
  uint64_t next_unit_ = 0;
  uint64_t flying_slices_ = 0;
  bool queued_ = false;  // in a ready queue
  bool cancel_ = false;
  double submitted_at_ = 0;
  double begun_at_ = 0;
  JobResult result_;

  std::atomic<bool> done_{false};
  std::mutex wait_mutex_;
  std::condition_variable waiters_;
};

using JobPtr = std::shared_ptr<Job>;

// Powers of two of microseconds: bucket i counts times below 2^i us, the last one the rest.
struct TimeHistogram {
  static constexpr size_t kBuckets = 28;
  std::array<uint64_t, kBuckets> counts{};
  double sum_seconds = 0;
  void add(double seconds);
};

struct Counters {  // per (direction, mover)
  uint64_t submitted = 0;
  uint64_t finished = 0;
  uint64_t failed = 0;
  uint64_t cancelled = 0;
  uint64_t bytes = 0;
  uint64_t pages = 0;
  uint64_t fragments = 0;
  uint64_t failed_pages = 0;
  TimeHistogram queue;
  TimeHistogram copy;
};

class Engine {
 public:
  static std::shared_ptr<Engine> create(size_t num_threads);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  JobPtr submit(const SubmitRequest& request);

  // Finished jobs of one lane in the order of their submission; a job is held back while an earlier
  // one of its lane is unfinished. Each is returned once.
  std::vector<JobPtr> finished(Lane lane);
  // Jobs submitted with `notify`, in the order in which they finished; waits for the first.
  std::vector<JobPtr> wait_notified(double seconds);

  // Waits until nothing of this plan is queued or running.
  bool drain(const Plan& plan, double seconds);
  size_t cancel_pending();  // what has not begun; returns how many
  // No submissions from now on. drain: carry out what is queued; else cancel it and stop running jobs
  // at their next slice. True if everything has ended within `seconds` (negative: no limit).
  bool shutdown(bool drain, double seconds);

  size_t num_threads() const { return num_threads_; }
  size_t in_flight();
  std::map<std::pair<std::string, std::string>, Counters> counters();
  uint64_t reports_dropped();

  // For tests: hold back lanes, and make pages fail.
  void stall(uint32_t lane_mask);
  void resume();
  void inject_fault(Direction direction, uint32_t layer_id, uint64_t page, std::string why);
  void clear_faults();

  static void shutdown_all(double drain_seconds);  // at the end of the interpreter

 private:
  struct Slice {
    JobPtr job;
    uint64_t first = 0;
    uint64_t last = 0;
  };
  struct Fault {
    Direction direction;
    uint32_t layer_id;
    uint64_t page;
    std::string why;
  };
  // A ready queue hands out the earliest submission first.
  using ReadyQueue = std::map<uint64_t, JobPtr>;

  explicit Engine(size_t num_threads);
  friend class Job;

  void check_usable() const;
  void enqueue(const JobPtr& job, const std::vector<uint64_t>& overlaps,
               const SubmitRequest& request);
  void start_threads(bool waits);
  void work(size_t crew);  // 0: copying threads; 1 + lane: the thread of that lane's device jobs
  ReadyQueue* next_queue(size_t crew);  // whose turn it is; null: nothing to do
  bool has_slice(size_t crew);
  bool take_slice(size_t crew, Slice& slice);
  void run_slice(const Slice& slice, MoveReport& report, const std::vector<Fault>& faults) const;
  void end_slice(const Slice& slice, MoveReport& report, std::vector<JobPtr>& ended);
  void account_progress(Job& job, uint64_t first, uint64_t last, const MoveReport& report);
  void make_ready(const JobPtr& job);
  void end_jobs(JobPtr job, std::vector<JobPtr>& ended);
  void finish(Job& job);
  bool cancel(Job& job);
  bool cancel_waiting(const JobPtr& job, std::vector<JobPtr>& ended);
  void stop_running(const JobPtr& job, std::vector<JobPtr>& ended);
  static void announce(const std::vector<JobPtr>& ended);
  void reap();

  const size_t num_threads_;
  const Home home_;  // the process that owns the threads
  std::weak_ptr<Engine> self_;  // for jobs, which do not keep their engine

  // Order of submission; held for the whole of submit().
  std::mutex submit_mutex_;
  uint64_t next_seq_ = 1;
  Intake intake_;
  std::atomic<uint64_t> oldest_live_{1};

  // Everything below is under this mutex; copying happens outside it.
  std::mutex mutex_;
  std::condition_variable copy_work_;
  std::array<std::condition_variable, kNumLanes> lane_work_;
  std::condition_variable idle_;      // a job has ended
  std::condition_variable notified_;  // a job to be notified has ended
  std::array<std::array<ReadyQueue, kNumLanes>, 1 + kNumLanes> ready_;
  std::deque<JobPtr> live_;  // by seq - live_first_; null: ended, or never queued
  uint64_t live_first_ = 1;
  size_t num_live_ = 0;
  std::array<std::deque<JobPtr>, kNumLanes> lanes_;  // reported ones, in order of submission
  std::deque<JobPtr> notifications_;
  uint64_t reports_dropped_ = 0;
  std::vector<std::shared_ptr<void>> retired_;  // let go by the next caller
  std::map<std::pair<Direction, Mover*>, Counters> counters_;
  std::vector<Fault> faults_;
  uint32_t stalled_lanes_ = 0;
  size_t idle_copiers_ = 0;
  Lane last_lane_ = Lane::Load;
  bool closed_ = false;    // no more submissions
  bool stopping_ = false;  // workers leave when nothing is ready
  std::vector<std::thread> threads_;
  size_t copiers_started_ = 0;
  size_t lane_threads_started_ = 0;
};

}  // namespace vkvmap
