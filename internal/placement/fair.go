package placement

import (
	"strings"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// fair is a queue of claims, NAMESPACE/NAME, in which namespaces take turns. Each try costs requests, whose rate is limited, and a tenant
// may make thousands of claims that nothing can be done for: they delay only each other.
type fair struct {
	waiting map[string][]string // claims by namespace
	turns   []string            // namespaces that have some
	n       int
}

// newQueue returns a fair queue that tries a claim again later each time.
func newQueue() workqueue.TypedRateLimitingInterface[string] {
	queue := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[string]{Queue: &fair{waiting: map[string][]string{}}})
	return workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](200*time.Millisecond, time.Minute),
		workqueue.TypedRateLimitingQueueConfig[string]{
			DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Queue: queue})})
}

// Touch does nothing: a claim that is added again keeps its place.
func (f *fair) Touch(string) {}

// Push adds a claim.
func (f *fair) Push(claim string) {
	namespace, _, _ := strings.Cut(claim, "/")
	if len(f.waiting[namespace]) == 0 {
		f.turns = append(f.turns, namespace)
	}
	f.waiting[namespace] = append(f.waiting[namespace], claim)
	f.n++
}

// Len is the number of claims.
func (f *fair) Len() int { return f.n }

// Pop removes the first claim of the namespace whose turn it is.
func (f *fair) Pop() string {
	namespace := f.turns[0]
	f.turns = f.turns[1:]
	claims := f.waiting[namespace]
	if len(claims) > 1 {
		f.waiting[namespace] = claims[1:]
		f.turns = append(f.turns, namespace)
	} else {
		delete(f.waiting, namespace)
	}
	f.n--
	return claims[0]
}
