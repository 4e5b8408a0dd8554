// Package clustertest gives tests of nodes what lies between these: addresses that stay free, links that are slow, lossy or
// cut, and machines of their own. It is for tests only and knows nothing of ours; its goroutines end with the test.
package clustertest
